"""`Connector`: takes the media of requests, and hands out their features when they are needed."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from fxsplit_encoder.connector.books.audit import audit
from fxsplit_encoder.connector.books.books import Books, Step
from fxsplit_encoder.connector.books.encoding import WorkerStatus
from fxsplit_encoder.connector.books.holdings import Holdings
from fxsplit_encoder.connector.books.tickets import Ticket
from fxsplit_encoder.connector.interfaces import MediaItem, MediaProcessor, PromptRun
from fxsplit_encoder.connector.keys import TowerIdentity, feature_key
from fxsplit_encoder.connector.positions import FeatureRows, MergedRows, merge_rows
from fxsplit_encoder.connector.request import ConnectorConfig, EncodeRequest
from fxsplit_encoder.connector.states import Availability, State
from fxsplit_encoder.connector.statistics import ConnectorStats
from fxsplit_encoder.connector.threads.copies import Copies
from fxsplit_encoder.connector.threads.core import Core
from fxsplit_encoder.connector.threads.pool import EncoderFactory, Pool, make_encoders, row_bytes_of
from fxsplit_encoder.connector.threads.preparers import Preparers
from fxsplit_encoder.encode_queue.batch_thread import EXIT_SECONDS, deadline_of, join
from fxsplit_encoder.errors import InputError

_ANY_TOWER = TowerIdentity(b"", "", "")


class Connector:
    """Encodes the media of requests in the background of the engine that serves them. Threads may share it.

    CPU workers read, hash, decode and preprocess; workers with an encoder each form batches of different
    requests' items; features wait in bounded memory until the engine merges them and releases them.

    Args:
        processor: counts the tokens of media, hashes them, and turns them into an encoder's inputs.
        encoders: for each worker, what makes its encoder, which is started on the worker's own thread; called
            again when a worker is lost.
        config: sizes and limits.
        identity: of the encoders' tower, on which names of features depend; None: of one tower for ever.
        copies: makes host buffers and copies; None: as the devices do.

    Raises:
        InputError: there is no encoder, or they do not agree on the size of rows.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        encoders: Sequence[EncoderFactory],
        config: ConnectorConfig | None = None,
        *,
        identity: TowerIdentity | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.config = config if config is not None else ConnectorConfig()
        self.processor = processor
        self._identity = identity if identity is not None else _ANY_TOWER
        self._copies = copies if copies is not None else Copies()
        first = make_encoders(encoders)
        lock = threading.Lock()
        holdings = Holdings(self.config, row_bytes_of(first).get, threading.Condition(lock))
        self._core = Core(lock, Books(holdings, self._key_of))
        self._pool = Pool(self._core, encoders, first, self._copies)
        preparers = Preparers(self._core, processor, self._pool.stage, self.config.cpu_workers)
        self._threads = [*preparers.threads, self._core.clock.thread]
        for thread in self._threads:
            thread.start()
        self._at_exit = partial(self.close, EXIT_SECONDS)
        atexit.register(self._at_exit)

    def _key_of(self, digest: bytes, salt: str) -> bytes:
        return feature_key(digest, self._identity, salt, "sha256")

    # --- requests

    def submit(self, request: EncodeRequest) -> Ticket:
        """Takes a request; nothing of its media is read before this returns.

        The caller keeps the ticket: steps name it. Its `token_counts` are exact, from the headers of the
        media, which CPU workers read first. A request that cannot be encoded, or whose prompt has not the
        placeholders that its items need, fails its ticket, or makes it text alone, as it asked for.

        Raises:
            ConnectorFullError: too much is waiting; submit it again later.
            ConnectorError: the connector is closed, or the request is beyond a limit by itself.
            InputError: the request asks for a reduction, and the processor cannot reduce; or it has no media,
                and its prompt has placeholders.
        """
        kind = type(self.processor)
        if request.failure.reduce is not None and kind.reduce is MediaProcessor.reduce:
            raise InputError(f"reduce: {kind.__name__} cannot ask less of an item; leave it out")
        if request.placeholders is not None and not request.items:
            request.placeholders.merged_length(())  # raises before anything is held
        with self._core.change() as books:
            return books.submit(request)

    def prompt_runs(self, item: MediaItem) -> Sequence[PromptRun]:
        """Read the placeholder runs of an item from its header or dimensions; raises as the processor."""
        return self.processor.prompt_runs(item)

    def step(self) -> Step:
        """Report changes of tickets since the last step, in each step of the engine; waits for nothing."""
        with self._core.change() as books:
            return books.step()

    def has_pending_work(self) -> bool:
        """Whether a later step may have something to tell, so that the engine must not sleep for good."""
        with self._core.lock:
            return self._core.books.has_pending_work

    def hold(self, ticket: Ticket, item: int | None = None) -> Availability:
        """Holds every item of a ticket, or one, once more; each hold needs a `release`, as does submission.

        What was released is found again, or encoded again: the ticket is "deferred" then. "unavailable":
        nothing is held, since the ticket failed or was cancelled, or because one item alone would wait for
        memory while others of its ticket hold some.
        """
        with self._core.change() as books:
            return books.hold(ticket, item)

    def release(self, ticket: Ticket, item: int | None = None, *, keep: bool = False) -> int:
        """Lets go of every item of a ticket, or of one, once; how many holds that were. One that is not ready
        is given up. With `keep` rows stay until memory is needed, though the request did not ask for it.
        """
        with self._core.change() as books:
            return books.release(ticket, item, keep=keep)

    def cancel(self, ticket: Ticket, item: int | None = None) -> bool:
        """Gives up every item of a ticket, or one, however often it is held; whether there was any. What
        waits never enters a batch; what is in one is discarded afterwards, unless others want it.
        """
        with self._core.change() as books:
            return books.cancel(ticket, item)

    # --- features

    @contextlib.contextmanager
    def read(
        self, ticket: Ticket, items: Sequence[int] | None = None, *, device: torch.device | str = "cpu"
    ) -> Iterator[dict[int, FeatureRows]]:
        """Read rows of items, which stay until the current stream of `device` is through with what it was
        given inside; InputError: one is not ready.
        """
        reader = torch.device(device)  # before anything is held: it may be no device
        with self._core.change() as books:
            features = books.begin_read(ticket, range(len(ticket.items)) if items is None else items)
        event = None
        try:
            yield {
                index: FeatureRows(feature.rows, ticket.metadata(index))
                for index, feature in features.items()
            }
        finally:
            try:
                event = self._copies.mark(reader)
            finally:  # a device that records no event any more reads nothing any more
                with self._core.change() as books:
                    books.end_read(features.values(), event)

    def merge(
        self, ticket: Ticket, token_range: tuple[int, int], embeddings: Tensor, levels: int | None = None
    ) -> MergedRows:
        """Writes the rows of a ticket's items into the embeddings of some tokens of its prompt.

        Args:
            ticket: that is ready; its request says where its placeholders are.
            token_range: the first position of the merged prompt and the one after the last, for prefill in
                chunks.
            embeddings: (positions, width) of these tokens, of any floating dtype and on any device; those of
                placeholders are overwritten, by the current stream of the device.
            levels: deepstack levels that follow the main output in each row; None: as metadata say.

        Raises:
            InputError: the ticket or an item is not ready, the request has no placeholders, the range is not
                one of the merged prompt, or rows do not have the width. Nothing was written.
        """
        placeholders, (start, stop) = ticket.request.placeholders, token_range
        if placeholders is None:
            raise InputError(f"request {ticket.request.id}: expected placeholders; got none, so use read()")
        if ticket.state is not State.READY:
            raise InputError(f"request {ticket.request.id}: expected it to be ready; it is {ticket.state}")
        counts = ticket.token_counts
        length = placeholders.merged_length(counts)
        if not 0 <= start <= stop <= length:
            raise InputError(f"token_range: expected one within 0 to {length}; got {start} to {stop}")
        if embeddings.dim() != 2 or embeddings.shape[0] != stop - start:
            raise InputError(f"embeddings: expected ({stop - start}, width); got {tuple(embeddings.shape)}")
        places = placeholders.places(counts, start, stop)
        inside = sorted({item for item, _, _ in places.pieces})
        with self.read(ticket, inside, device=embeddings.device) as features:
            if levels is None:
                # Of any item, so that a chunk of text alone has the levels of its request too.
                known: Iterator[Any] = (item.metadata.get("deepstack_levels", 0) for item in ticket.items)
                levels = int(next(known, 0))
            rows = {index: feature.rows for index, feature in features.items()}
            return merge_rows(rows, places, embeddings, levels)

    # --- workers and books

    def workers(self) -> dict[str, WorkerStatus]:
        """How each worker is, by name."""
        with self._core.lock:
            return {name: worker.status for name, worker in self._core.books.encoding.workers.items()}

    def drain_worker(self, name: str) -> None:
        """Lets a worker finish what it has in hand and stop; `restart_worker` starts it again."""
        self._pool.drain(name)

    def restart_worker(self, name: str) -> None:
        """Starts a worker in place of one that has stopped, was lost, or hangs."""
        self._pool.restart(name)

    def change_identity(self, identity: TowerIdentity) -> None:
        """After other weights were loaded: features that were made before are not found any more."""
        with self._core.change() as books:
            self._identity = identity
            self._core.dtypes.clear()
            books.clear_cache()

    def clear_cache(self) -> None:
        """Frees features without holders, and idle host buffers."""
        with self._core.change() as books:
            books.clear_cache()
        self._copies.give_back()

    def stats(self) -> ConnectorStats:
        """The counts so far."""
        with self._core.lock:
            return self._core.books.snapshot()

    def audit(self) -> list[str]:
        """Count the books again from the objects; return what does not add up."""
        with self._core.change() as books:
            books.settle()
            return audit(books)

    # --- the end

    def close(self, timeout_s: float | None = 60.0) -> None:
        """Cancel every ticket, let workers finish what they have in hand, and free everything; idempotent. A
        thread that takes longer than `timeout_s` is left to itself, with a warning.
        """
        deadline = deadline_of(timeout_s)
        with self._core.change() as books:
            books.close()
        for name in self.workers():
            self._pool.drain(name)
        joined: list[threading.Thread] = []
        while threads := [thread for thread in self._pool.threads() if thread not in joined]:
            join(threads, deadline)
            joined += threads
        with self._core.lock:
            self._core.clock.stop()
        join(self._threads, deadline)
        self.clear_cache()
        while self._core.books.holdings.storage.quarantine and time.monotonic() < deadline:
            time.sleep(0.001)
            self.clear_cache()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
