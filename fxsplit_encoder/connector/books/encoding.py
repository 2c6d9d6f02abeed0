"""Workers, the batches that they have, and rows between their encoder and where they will lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fxsplit_encoder.connector.books.holdings import Holdings
from fxsplit_encoder.connector.books.tickets import Account, Entry, Event, Feature, has_passed
from fxsplit_encoder.connector.states import Residence, State
from fxsplit_encoder.encode_queue.queue import BATCHES_IN_FLIGHT, MOST_LOSSES
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


@dataclass(eq=False)
class Worker:
    """One worker, whose successors have the same name; `staging` holds the batches that it has in hand."""

    name: str
    modalities: frozenset[str]
    staging: Account
    num_losses: int = 0
    """How many workers of this name were lost, one after another, before this one."""
    status: WorkerStatus = WorkerStatus.STARTING
    batches: dict[Batch, None] = field(default_factory=dict)
    """Those that it has in hand, unless it was given up."""
    is_running: bool = True
    """Whether its thread may still write to what its batches have."""
    counted_until: float = 0.0
    """Up to when it was asked to rest for what it did."""
    rests_until: float = 0.0
    """Until when it takes none."""

    @property
    def load(self) -> float:
        """Predicted cost of what it has in hand."""
        return sum(batch.cost for batch in self.batches)

    @property
    def is_free(self) -> bool:
        """Whether it may be given another batch."""
        return self.status is WorkerStatus.RUNNING and len(self.batches) < BATCHES_IN_FLIGHT

    def finish(self, begin: float, now: float, busy_share: float, *, is_slice: bool = False) -> None:
        """It was busy, and takes no other batch, or gives its device no other slice, before it was busy for
        no more than this share.
        """
        begin = max(begin, self.counted_until)
        self.counted_until = now
        if busy_share < 1:
            self.rests_until = max(self.rests_until, begin) + (now - begin) / busy_share
            if is_slice:  # what it has in hand rests, too
                self.counted_until = self.rests_until


_OUT_OF_PROPORTION = 3.0
"""Times the cost of all that come before it in a batch. What costs more fills a device by itself, and little
is lost by encoding it apart."""


class Batch(Event):
    """Entries that one worker encodes together. As an event, it has passed once nothing writes for it."""

    def __init__(self, worker: Worker, entries: list[Entry], now: float) -> None:
        self.worker = worker
        self.memory = worker.staging.take(sum(entry.num_bytes for entry in entries))
        self.entries = entries
        self.inputs: list[Any] = [entry.prepared for entry in entries]
        """Kept for as long as a device may read them."""
        self.cost = sum(entry.cost for entry in entries)
        self.taken_at = now
        self.progressed_at = now
        """When it was taken, or the last of its slices was over."""
        self.outputs: Any = None
        """Rows as the encoder returned them, for as long as a device may read them."""
        self.events: list[Event] = []
        """When everything is over that the device was given for it."""
        self.totals: dict[Entry, Any] = {}
        """The sum of each entry's rows, which is finite unless one of its values is not."""
        self.failures: dict[Entry, ConnectorError] = {}
        """What is known to have failed."""
        self.is_launched = False
        """Whether the device was given everything, and what is above will not change."""
        self.has_returned = False
        """Whether the worker's thread has finished it."""
        worker.batches[self] = None

    @property
    def is_lost(self) -> bool:
        """Whether its worker has it no more, so that its results are dropped."""
        return self not in self.worker.batches

    @property
    def has_ended(self) -> bool:
        """Whether its thread is through with it."""
        return self.has_returned or not self.worker.is_running

    def query(self) -> bool:
        """Whether its thread is through with it, and the device with what it was given."""
        return self.has_ended and all(map(has_passed, self.events))

    def close(self) -> None:
        """Take it from its worker, with its memory."""
        del self.worker.batches[self]
        self.memory.free()


class Encoding:
    """Hands out batches, and takes what becomes of them."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._config, self._stats, self._storage = holdings.config, holdings.stats, holdings.storage
        self._clock = holdings.clock
        longest = self._config.hang_timeout_s
        self._longest = math.inf if longest is None else longest
        self.workers: dict[str, Worker] = {}

    # --- workers

    def add_worker(self, name: str, modalities: frozenset[str], num_losses: int = 0) -> Worker:
        """A worker that is about to start, in place of one of the same name."""
        staging = self._storage.open(f"staging {name}", self._config.staging_bytes)
        self.workers[name] = Worker(name, modalities, staging, num_losses)
        return self.workers[name]

    def fail_unserved(self) -> None:
        """Fails what waits for workers all of which were lost."""
        lost = [worker for worker in self.workers.values() if worker.status is WorkerStatus.LOST]
        if not lost:
            return
        serving = {m for worker in self.workers.values() if worker not in lost for m in worker.modalities}
        for entry in [entry for entry in self._holdings.to_encode if entry.modality not in serving]:
            if self._holdings.to_encode.discard(entry):
                error = ConnectorError("every worker that encodes it was lost", "worker_lost", retryable=True)
                self._holdings.fail(entry, error, may_retry=False)

    def lose_worker(self, worker: Worker, *, is_running: bool) -> None:
        """A worker's thread has ended by a fault, or is given up while it runs: others get its batches."""
        if worker.status is not WorkerStatus.LOST:
            self._stats.lost_workers += 1
        worker.status = WorkerStatus.LOST
        self._publish_over(worker)
        worker.is_running = is_running
        for batch in list(worker.batches):
            self._lose(batch)

    # --- batches

    def take(self, worker: Worker, most_cost: float | None = None) -> Batch | float | None:
        """The next batch of a worker, if there is one and no other worker has less in hand; else the seconds
        after which to ask again, or None: once something has changed.
        """
        waiting = self._holdings.to_encode
        if not waiting or not worker.is_free:
            return None
        peers = [
            each
            for each in self.workers.values()
            if each.status is WorkerStatus.RUNNING and each.modalities & worker.modalities
        ]
        load = worker.load
        if any(each.is_free and each.load < load for each in peers):
            return None
        if (rest := worker.rests_until - self._clock()) > 0:
            return rest
        # So much that all workers of the same kind come to have the same in hand.
        share = (waiting.cost + sum(each.load for each in peers)) / len(peers) - load
        share = share if len(peers) > 1 else math.inf
        chosen = self._choose(worker, share, most_cost)
        return self._start(worker, chosen) if chosen else None

    def _choose(self, worker: Worker, share: float, most_cost: float | None) -> list[Entry]:
        """The next entries for a worker, in the order in which they are due; none if the first has no room.

        Above the cost `share` further entries are left to other workers; `most_cost` bounds the first too.
        """
        free_bytes = worker.staging.free
        chosen: list[Entry] = []
        cost = 0.0
        for entry in self._holdings.to_encode:
            if entry.modality not in worker.modalities:
                continue
            free_bytes -= entry.num_bytes
            cost += entry.cost
            if most_cost is not None and cost > most_cost:
                break
            if free_bytes < 0 or (chosen and (cost > share or entry.num_losses)):
                break
            if chosen and entry.cost > _OUT_OF_PROPORTION * (cost - entry.cost):
                break  # images are ready together, and not as late as a video that came with them
            chosen.append(entry)
            if len(chosen) == self._config.max_batch_items or entry.num_losses:
                break  # one that was in hand when a worker was lost goes alone, and loses nobody else
        return chosen

    def _start(self, worker: Worker, chosen: list[Entry]) -> Batch:
        now = self._clock()
        batch = Batch(worker, chosen, now)
        for entry in chosen:
            self._holdings.to_encode.take(entry)
            self._holdings.move(entry, State.ENCODING)
            waited = now - entry.queued_at
            self._stats.queue.add(waited)
            for item in entry.holders:
                item.ticket.queue_seconds = max(item.ticket.queue_seconds, waited)
        self._stats.batches += 1
        self._stats.batch_items += len(chosen)
        self._stats.batch_tokens += sum(entry.num_tokens for entry in chosen)
        return batch

    def split(self, batch: Batch, error: ConnectorError) -> list[Batch]:
        """The halves of a batch that failed as a whole; none: its only entry has failed, or it is lost."""
        if batch.is_lost or len(batch.entries) == 1:
            batch.failures = dict.fromkeys(batch.entries, error)
            self.publish(batch)
            return []
        self._stats.split_batches += 1
        batch.close()
        middle = len(batch.entries) // 2
        halves = (batch.entries[:middle], batch.entries[middle:])
        return [Batch(batch.worker, entries, batch.taken_at) for entries in halves]

    # --- workers that hang

    def next_hang(self) -> float:
        """When a worker will have hung for too long, unless it goes on before."""
        begins = (batch.progressed_at for worker in self.workers.values() for batch in worker.batches)
        return min(begins, default=math.inf) + self._longest

    def hung_workers(self) -> list[Worker]:
        """The workers that have made no progress with a batch for too long."""
        late, workers = self._clock() - self._longest, self.workers.values()
        return [each for each in workers if any(batch.progressed_at <= late for batch in each.batches)]

    # --- rows

    def place(self, batch: Batch, outputs: Mapping[Entry, Any]) -> dict[Entry, Feature]:
        """Where rows of a batch will lie: each stays where it is, or has to be copied to the host."""
        placed = {}
        for entry, rows in outputs.items() if not batch.is_lost else ():
            if (memory := self._storage.claim_device(str(rows.device), rows.nbytes)) is not None:
                entry.feature = Feature(rows, Residence.DEVICE, memory)
            else:  # the memory that it has until rows are there becomes theirs
                entry.feature = Feature(None, Residence.HOST, entry.memory)
                entry.memory = None
            placed[entry] = entry.feature
        return placed

    def _free_rows(self, entry: Entry, events: Sequence[Event]) -> None:
        """Free rows that will not arrive, with the buffer that they may be copied to until some events."""
        feature, entry.feature = entry.feature, None
        if feature is not None:
            feature.read_events = list(events)
            self._storage.free(feature)

    def launched(self, batch: Batch) -> None:
        """The device was given everything of a batch, and it is not over yet."""
        batch.is_launched = True
        self.poll()

    def poll(self) -> None:
        """Publish the batches that are over, before their workers' threads notice."""
        for worker in self.workers.values():
            self._publish_over(worker)

    def _publish_over(self, worker: Worker) -> None:
        for batch in [batch for batch in worker.batches if batch.is_launched]:
            if all(has_passed(event, if_lost=False) for event in batch.events):
                self.publish(batch)

    def publish(self, batch: Batch) -> None:
        """Every row of a batch is where it will lie, but for those of entries that failed."""
        worker = batch.worker
        batch.has_returned = True
        if batch.is_lost:
            return  # or somebody saw it before
        worker.finish(batch.taken_at, self._clock(), self._config.max_busy_share)
        worker.num_losses = 0
        for entry in batch.entries:
            seconds = self._clock() - batch.taken_at
            for item in entry.holders:
                item.ticket.encode_seconds = max(item.ticket.encode_seconds, seconds)
            if (error := batch.failures.get(entry) or _not_finite(batch, entry)) is not None:
                self._fail(entry, error, batch)
            else:
                self._stats.encode.add(seconds)
                self._arrive(entry)
        batch.close()

    def _arrive(self, entry: Entry) -> None:
        entry.drop_memory()  # it has some where rows lie on a device
        entry.media = None
        entry.drop_inputs()
        if not entry.is_wanted:
            self._stats.discarded += 1
            self._holdings.drop(entry, State.CANCELLED)
            return
        self._holdings.move(entry, State.READY)
        for item in entry.holders:
            item.metadata = entry.metadata
        if not entry.holders:
            self._storage.rest(entry)

    def _fail(self, entry: Entry, error: ConnectorError, batch: Batch) -> None:
        self._free_rows(entry, batch.events)
        if not entry.is_wanted:
            self._holdings.drop(entry, State.CANCELLED)
            return
        self._holdings.fail(entry, error, may_retry=self._has_memory(entry))

    def _has_memory(self, entry: Entry) -> bool:
        """Whether an entry has memory to be encoded again. What it had may be lost to a copy under way."""
        if entry.memory is None and (reserved := self._storage.reserve([entry.num_bytes])) is not None:
            (entry.memory,) = reserved
        return entry.memory is not None

    # --- lost workers

    def _lose(self, batch: Batch) -> None:
        """Pass the entries of a batch on, each alone; its memory is kept until its thread has returned."""
        del batch.worker.batches[batch]
        used = (batch.outputs, batch.inputs)
        self._storage.free(Feature(used, Residence.NONE, batch.memory, read_events=[batch]))
        for entry in batch.entries:
            self._free_rows(entry, [batch])
        for entry in batch.entries:
            self._pass_on(entry)

    def _pass_on(self, entry: Entry) -> None:
        entry.num_losses += 1
        if not entry.holders:
            self._holdings.drop(entry, State.CANCELLED)
        elif entry.num_losses >= MOST_LOSSES:
            message = f"{entry.num_losses} workers were lost while they encoded it"
            self._holdings.fail(entry, ConnectorError(message, "worker_lost", retryable=False))
        elif not self._has_memory(entry):
            message = "its worker was lost, and there is no memory to encode it again"
            error = ConnectorError(message, "worker_lost", retryable=True)
            self._holdings.fail(entry, error, may_retry=False)
        else:
            self._holdings.enqueue(entry, is_first=True)


def _not_finite(batch: Batch, entry: Entry) -> ConnectorError | None:
    if math.isfinite(float(batch.totals.get(entry, 0.0))):
        return None
    return ConnectorError("the encoder returned NaN or infinity", "encoder", retryable=True)
