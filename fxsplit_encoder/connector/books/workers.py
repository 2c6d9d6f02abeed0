"""What the books know of the workers: who may take how much of what waits."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from fxsplit_encoder.connector.books.arrivals import Arrival
from fxsplit_encoder.connector.books.entry import Entry
from fxsplit_encoder.connector.books.events import Event
from fxsplit_encoder.connector.books.fair_queue import FairQueue
from fxsplit_encoder.connector.settings import ConnectorConfig
from fxsplit_encoder.errors import ConnectorError


class WorkerStatus(StrEnum):
    """How a worker is."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    """It finishes what it has and takes nothing more."""
    STOPPED = "stopped"
    LOST = "lost"
    """Its thread or its encoder ended by a fault, and is not started again."""


LIVE = frozenset({WorkerStatus.STARTING, WorkerStatus.RUNNING})
"""Those of a worker that encodes, or will soon."""


class Worker:
    """One worker, as the books see it.

    Args:
        name: unlike those of others.
        modalities: that it encodes.
    """

    def __init__(self, name: str, modalities: frozenset[str]) -> None:
        self.name = name
        self.modalities = modalities
        self.status = WorkerStatus.STARTING
        self.account = f"staging {name}"
        """The ledger's account of the batches that it has in hand."""
        self.load = 0.0
        """Predicted cost of these."""
        self.num_batches = 0
        self.was_busy_until = self.rests_until = 0.0
        """When its last batch was over, and until when it takes none."""
        self.num_losses = 0
        """How many workers of this name were lost, one after another, before this one."""

    def finish(self, batch: Batch, now: float, busy_share: float) -> None:
        """One of its batches is over; it takes no other before it was busy for no more than this share."""
        begin = max(batch.taken_at, self.was_busy_until, batch.rested_until)
        self.was_busy_until = now
        self._rest(begin, now, busy_share)

    def finish_slice(self, batch: Batch, begin: float, now: float, busy_share: float) -> None:
        """Part of a batch is over that was given to the device after the last one's rest."""
        self._rest(max(begin, batch.rested_until), now, busy_share)
        if busy_share < 1:
            batch.rested_until = self.rests_until

    def _rest(self, begin: float, now: float, busy_share: float) -> None:
        if busy_share < 1:
            self.rests_until = max(self.rests_until, begin) + (now - begin) / busy_share

    def __repr__(self) -> str:
        return f"Worker({self.name}, {self.status})"


_OUT_OF_PROPORTION = 3.0
"""Times the cost of all that come before it in a batch. What costs more fills a device by itself, and little
is lost by encoding it apart."""


class Batch:
    """Entries that one worker encodes together.

    Args:
        worker: that has it in hand.
        entries: in the order of the encoder's outputs.
        now: when it was taken.
    """

    def __init__(self, worker: Worker, entries: list[Entry], now: float) -> None:
        self.worker = worker
        self.entries = entries
        self.inputs = [entry.prepared for entry in entries]
        """Kept for as long as a device may read them."""
        self.num_bytes = sum(entry.num_bytes for entry in entries)
        self.cost = sum(entry.cost for entry in entries)
        self.taken_at = now
        self.rested_until = 0.0
        """The end of the worker's last rest between slices of it: up to then it has rested enough."""
        self.outputs: Any = None
        """Rows as the encoder returned them, for as long as a device may read them."""
        self.events: list[Event] = []
        """When everything is over that the device was given for it."""
        self.arrivals: list[Arrival] = []
        """The rows that it makes."""
        self.failures: dict[Entry, ConnectorError] = {}
        """What is known to have failed."""
        self.is_launched = False
        """Whether the device was given everything, and what is above will not change."""
        self.is_lost = False
        """Whether its worker was given up; nobody waits for its results."""

    def __repr__(self) -> str:
        return f"Batch({len(self.entries)} entries, {self.worker.name})"


def choose(
    waiting: FairQueue[Entry],
    worker: Worker,
    config: ConnectorConfig,
    free_bytes: int,
    share: float,
    most_cost: float | None = None,
) -> list[Entry]:
    """The next entries for a worker, in the order in which they are due; none if the first has no room yet.

    Args:
        waiting: what is to be encoded.
        worker: who asks.
        config: the limits of a batch.
        free_bytes: for their features.
        share: cost above which further entries are left to other workers.
        most_cost: of all together, the first included; None: any.
    """
    chosen: list[Entry] = []
    cost, most = 0.0, min(share, config.max_batch_cost or share)
    for entry in waiting:
        if entry.modality not in worker.modalities:
            continue
        free_bytes -= entry.num_bytes
        cost += entry.cost
        if most_cost is not None and cost > most_cost:
            break
        if free_bytes < 0 or (chosen and (cost > most or entry.num_losses)):
            break
        if chosen and entry.cost > _OUT_OF_PROPORTION * (cost - entry.cost):
            break  # images are ready together, and not as late as a video that came with them
        chosen.append(entry)
        if len(chosen) == config.max_batch_items or entry.num_losses:
            break  # one that was in hand when a worker was lost goes alone, and loses nobody else
    return chosen


def is_least_loaded(worker: Worker, workers: Iterable[Worker], max_batches: int) -> bool:
    """Whether no other worker that could take the same has less in hand."""
    return not any(
        other.load < worker.load
        for other in workers
        if other.status is WorkerStatus.RUNNING
        and other.num_batches < max_batches
        and other.modalities & worker.modalities
    )


def share_of(worker: Worker, workers: Iterable[Worker], waiting_cost: float) -> float:
    """How much of what waits a worker takes, so that all of the same kind come to have the same in hand."""
    sharing = [
        each
        for each in workers
        if each.status is WorkerStatus.RUNNING and each.modalities & worker.modalities
    ]
    if len(sharing) <= 1:
        return float("inf")
    total = waiting_cost + sum(each.load for each in sharing)
    return total / len(sharing) - worker.load
