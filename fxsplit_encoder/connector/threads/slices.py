"""An item in slices: what its worker does between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fxsplit_encoder.connector.books.events import Event
from fxsplit_encoder.connector.books.workers import Batch, Worker, WorkerStatus
from fxsplit_encoder.connector.seams import PreparedItem, SlicingEncoder
from fxsplit_encoder.connector.threads.copies import Copies
from fxsplit_encoder.connector.threads.core import Core
from fxsplit_encoder.errors import EncoderLostError

_QUEUED = 2
"""Slices that a device has at most: it computes one while the host makes the next."""


class Slices:
    """Encodes batches of which some items are cut.

    Args:
        core: the books.
        worker: whose thread calls this.
        encoder: that cuts.
        copies: makes events.
        let_pass: gives the device a batch of no more than this cost, if one is due.
    """

    def __init__(
        self,
        core: Core,
        worker: Worker,
        encoder: SlicingEncoder,
        copies: Copies,
        let_pass: Callable[[float], None],
    ) -> None:
        self._core = core
        self._worker = worker
        self._encoder = encoder
        self._copies = copies
        self._let_pass = let_pass

    def encode(
        self,
        batch: Batch,
        items: Sequence[PreparedItem],
        encode: Callable[[Sequence[PreparedItem]], Sequence[Tensor]],
    ) -> list[Tensor]:
        """The features of items: those that are not cut together, then each of the others in slices.

        Args:
            batch: that they are in.
            items: some of it.
            encode: of several items at once.

        Raises:
            EncoderLostError: the device failed meanwhile.
        """
        most_cost = self._core.books.parts.config.max_slice_cost
        if most_cost is None or batch.cost <= most_cost:
            return list(encode(items))
        cut = {item: self._encoder.slices(item, most_cost) for item in items}
        whole = [item for item in items if len(cut[item]) == 1]
        features = dict(zip(whole, encode(whole), strict=True)) if whole else {}
        slices = [(item, part) for item in items if item not in features for part in cut[item]]
        rows: dict[PreparedItem, list[Tensor]] = {item: [] for item, _ in slices}
        events: list[Event] = []
        for number, (item, part) in enumerate(slices):
            begin = self._core.books.parts.clock()
            rows[item] += encode([part])
            if number + 1 < len(slices):
                events.append(self._copies.mark(rows[item][-1].device))
                self._between(batch, events, begin)
                self._let_pass(most_cost)
        features |= {item: torch.cat(parts) for item, parts in rows.items()}
        return [features[item] for item in items]

    def _between(self, batch: Batch, events: list[Event], begin: float) -> None:
        share = self._core.books.parts.config.max_busy_share
        try:
            while len(events) >= (_QUEUED if share == 1 else 1):
                events.pop(0).synchronize()
        except RuntimeError as error:  # no item is to blame
            raise EncoderLostError(f"its device failed: {error}") from error
        if share < 1:
            self._rest(batch, begin, share)

    def _rest(self, batch: Batch, begin: float, share: float) -> None:
        """As long as a slice asks for, unless the worker is told to end."""
        core, clock = self._core, self._core.books.parts.clock
        with core.lock:
            self._worker.finish_slice(batch, begin, clock(), share)
            while self._worker.status is WorkerStatus.RUNNING:
                if (left := self._worker.rests_until - clock()) <= 0:
                    break
                core.encode_work.wait(left)
