"""The way of entries through batches: taken, placed where they will lie, and published once they are
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fxsplit_encoder.connector.books.arrivals import Arrival, orphan, place, settle_in
from fxsplit_encoder.connector.books.entry import Entry, Feature
from fxsplit_encoder.connector.books.holdings import Holdings
from fxsplit_encoder.connector.books.host_buffers import HOST
from fxsplit_encoder.connector.books.parts import Parts
from fxsplit_encoder.connector.books.workers import (
    Batch,
    Worker,
    WorkerStatus,
    choose,
    is_least_loaded,
    share_of,
)
from fxsplit_encoder.connector.states import Residence, State
from fxsplit_encoder.errors import ConnectorError


class Taken(NamedTuple):
    """What a worker is to do."""

    batch: Batch | None = None
    wait_s: float | None = None
    """Without a batch: after how many seconds to ask again; None: once something has changed."""


class Encoding:
    """Hands out batches, and takes what becomes of them."""

    def __init__(self, parts: Parts, holdings: Holdings) -> None:
        self._parts = parts
        self._holdings = holdings
        self.workers: dict[str, Worker] = {}
        self.batches: dict[Batch, None] = {}
        """Those in hand, of workers that were not given up."""
        self.leftovers: dict[Batch, list[Feature]] = {}
        """What batches may still write to whose worker was given up while it ran."""

    # --- workers

    def add_worker(self, worker: Worker) -> None:
        """A worker that is about to start, in place of one of the same name."""
        self.workers[worker.name] = worker
        self._parts.ledger.open(worker.account, self._parts.config.staging_bytes)

    def fail_unserved(self) -> None:
        """Fails what waits for workers all of which were lost."""
        lost = [worker for worker in self.workers.values() if worker.status is WorkerStatus.LOST]
        if not lost:
            return
        serving = {m for worker in self.workers.values() if worker not in lost for m in worker.modalities}
        for entry in [entry for entry in self._parts.to_encode if entry.modality not in serving]:
            if entry in self._parts.to_encode:
                self._parts.to_encode.remove(entry)
                error = ConnectorError("every worker that encodes it was lost", "worker_lost", retryable=True)
                self._holdings.fail(entry, error, may_retry=False)

    def lose_worker(self, worker: Worker, *, is_running: bool) -> None:
        """A worker's thread has ended by a fault, or is given up while it runs: others get its batches."""
        if worker.status is not WorkerStatus.LOST:
            self._parts.stats.lost_workers += 1
        worker.status = WorkerStatus.LOST
        self._publish_over(worker)
        for batch in [batch for batch in self.batches if batch.worker is worker]:
            self.lose(batch, is_running=is_running)
        if not is_running:
            for batch in [batch for batch in self.leftovers if batch.worker is worker]:
                self._returned(batch)

    # --- batches

    def take(self, worker: Worker, most_cost: float | None = None) -> Taken:
        """The next batch of a worker, if there is one and no other worker has less in hand.

        Args:
            worker: who asks.
            most_cost: of the batch; None: any.
        """
        config, waiting = self._parts.config, self._parts.to_encode
        everyone = self.workers.values()
        if worker.status is not WorkerStatus.RUNNING or worker.num_batches >= config.max_batches_in_flight:
            return Taken()
        if not waiting or not is_least_loaded(worker, everyone, config.max_batches_in_flight):
            return Taken()
        if (rest := worker.rests_until - self._parts.clock()) > 0:
            return Taken(wait_s=rest)
        share = share_of(worker, everyone, waiting.cost)
        free_bytes = self._parts.ledger.free(worker.account)
        chosen = choose(waiting, worker, config, free_bytes, share, most_cost)
        if not chosen:
            return Taken()
        delay = min(entry.queued_at for entry in chosen) + config.flush_delay_s - self._parts.clock()
        if delay > 0 and len(chosen) == len(waiting) and len(chosen) < config.max_batch_items:
            return Taken(wait_s=delay)
        return Taken(self._start(worker, chosen))

    def _start(self, worker: Worker, chosen: list[Entry]) -> Batch:
        parts, now = self._parts, self._parts.clock()
        batch = Batch(worker, chosen, now)
        reserved = parts.ledger.reserve(worker.account, batch, batch.num_bytes)
        assert reserved
        for entry in chosen:
            parts.to_encode.take(entry)
            self._holdings.move(entry, State.ENCODING)
            waited = now - entry.queued_at
            parts.stats.queue.add(waited)
            for ticket in self._tickets_of(entry):
                ticket.queue_seconds = max(ticket.queue_seconds, waited)
        parts.stats.batches += 1
        parts.stats.batch_items += len(chosen)
        parts.stats.batch_tokens += sum(entry.num_tokens for entry in chosen)
        worker.load += batch.cost
        worker.num_batches += 1
        self.batches[batch] = None
        return batch

    def place(self, batch: Batch, outputs: Sequence[Any]) -> list[Arrival]:
        """Where the rows of a batch will lie: each stays where it is, or has to be copied to the host.

        Args:
            batch: that was encoded.
            outputs: of each entry, its rows, or a ConnectorError.
        """
        if batch.is_lost:
            return []
        batch.outputs = outputs
        batch.arrivals = [
            place(self._parts, entry, rows)
            for entry, rows in zip(batch.entries, outputs, strict=True)
            if not isinstance(rows, ConnectorError)
        ]
        return batch.arrivals

    def attach(self, batch: Batch, arrival: Arrival, buffer: Any) -> bool:
        """A buffer was allocated for rows that are to be copied; False: nobody waits for them any more."""
        if not batch.is_lost:
            self._parts.storage.buffers.attach(arrival.entry, buffer)
        return not batch.is_lost

    def launched(self, batch: Batch) -> None:
        """The device was given everything of a batch, and it is not over yet."""
        batch.is_launched = True
        self.poll()

    def poll(self) -> None:
        """Publish the batches that are over, before their workers' threads notice."""
        for worker in self.workers.values():
            self._publish_over(worker)

    def _publish_over(self, worker: Worker) -> None:
        launched = [batch for batch in self.batches if batch.worker is worker and batch.is_launched]
        for batch in launched:
            if all(event.has_succeeded() for event in batch.events):
                self.publish(batch)

    def publish(self, batch: Batch) -> None:
        """Every row of a batch is where it will lie, but for those of entries that failed."""
        if batch.is_lost:
            self._returned(batch)
            return
        if batch not in self.batches:
            return  # somebody saw it before
        batch.worker.finish(batch, self._parts.clock(), self._parts.config.max_busy_share)
        batch.worker.num_losses = 0
        for entry in batch.entries:
            if (error := batch.failures.get(entry)) is not None:
                self._note_encoding(batch, entry)
                self._fail(entry, error, batch)
            else:
                self._arrive(batch, entry)
                self._holdings.drop_inputs(entry)
        del self.batches[batch]
        self._parts.ledger.release(batch.worker.account, batch)
        self._leave(batch)

    def _note_encoding(self, batch: Batch, entry: Entry) -> float:
        """How long an entry was in a batch, which its tickets are told."""
        seconds = self._parts.clock() - batch.taken_at
        for ticket in self._tickets_of(entry):
            ticket.encode_seconds = max(ticket.encode_seconds, seconds)
        return seconds

    def _arrive(self, batch: Batch, entry: Entry) -> None:
        self._parts.stats.encode.add(self._note_encoding(batch, entry))
        settle_in(self._parts, entry)
        if not entry.is_wanted:
            self._parts.stats.discarded += 1
            self._holdings.drop(entry, State.CANCELLED)
            return
        self._holdings.move(entry, State.READY)
        for item in entry.holders:
            item.metadata = entry.metadata
        if not entry.holders:
            self._parts.cache.rest(entry)
        self._parts.storage.was_freed = True

    def _fail(self, entry: Entry, error: ConnectorError, batch: Batch) -> None:
        if entry.feature is not None:
            orphan(self._parts, entry, batch.events)
        if not entry.is_wanted:
            self._holdings.drop(entry, State.CANCELLED)
            return
        self._holdings.fail(entry, error, may_retry=self._has_memory(entry))

    def _has_memory(self, entry: Entry) -> bool:
        """Whether an entry has memory to be encoded again. What it had may be lost to a copy under way."""
        if self._parts.ledger.owned(HOST, entry):
            return True
        return self._parts.storage.reserve([(entry, entry.num_bytes)])

    def _leave(self, batch: Batch) -> None:
        worker = batch.worker
        worker.num_batches -= 1
        worker.load = worker.load - batch.cost if worker.num_batches else 0.0

    # --- lost workers

    def lose(self, batch: Batch, *, is_running: bool) -> None:
        """A batch's worker is gone: its entries go to another, and each of them alone.

        Args:
            batch: that it had in hand.
            is_running: whether its thread may still go on, and write; its memory is kept until it has
            returned.
        """
        parts = self._parts
        batch.is_lost = True
        del self.batches[batch]
        rest = Feature((batch.outputs, batch.inputs), Residence.NONE, batch.worker.account)
        rest.read_events = list(batch.events)
        parts.ledger.move(rest.account, batch, rest)
        left = [rest]
        for entry in batch.entries:
            if entry.feature is not None:
                left.append(orphan(parts, entry, batch.events, is_free=False))
        for feature in left:
            feature.num_reads = int(is_running)
            parts.storage.free(feature)
        if is_running:
            self.leftovers[batch] = left
        self._leave(batch)
        for entry in batch.entries:
            self._pass_on(entry)

    def _pass_on(self, entry: Entry) -> None:
        entry.num_losses += 1
        if not entry.holders:
            self._holdings.drop(entry, State.CANCELLED)
        elif entry.num_losses >= self._parts.config.max_item_losses:
            message = f"{entry.num_losses} workers were lost while they encoded it"
            self._holdings.fail(entry, ConnectorError(message, "worker_lost", retryable=False))
        elif not self._has_memory(entry):
            message = "its worker was lost, and there is no memory to encode it again"
            error = ConnectorError(message, "worker_lost", retryable=True)
            self._holdings.fail(entry, error, may_retry=False)
        else:
            self._holdings.requeue(entry)

    def _returned(self, batch: Batch) -> None:
        """The thread of a batch that was given up has come to its end."""
        for feature in self.leftovers.pop(batch, []):
            feature.num_reads = 0
            feature.read_events = list(batch.events)
        self._parts.storage.settle()

    def _tickets_of(self, entry: Entry) -> list[Any]:
        numbers = {item.ticket for item in entry.holders}
        return [self._parts.tickets[number] for number in numbers]
