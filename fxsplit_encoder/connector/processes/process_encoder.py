"""What is counted of an encoder process."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from fxsplit_encoder.connector.interfaces import Modality, PreparedItem
from fxsplit_encoder.connector.processes.encoder_process import EncoderProcess
from fxsplit_encoder.connector.processes.messages import (
    START,
    Encode,
    Encoded,
    Hello,
    Start,
    Started,
    WireItem,
)
from fxsplit_encoder.connector.processes.program import EncoderProgram, ProcessOptions
from fxsplit_encoder.connector.transport.layout import Handle, to_plain
from fxsplit_encoder.errors import EncoderLostError, InputError, TransportError


@dataclass(frozen=True)
class ProcessStats:
    """Of one `ProcessEncoder`, over all processes that it has started."""

    starts: int
    """Processes that became ready."""
    losses: int
    """Processes that ended, or had to be ended, without `close`."""
    batches: int
    """Batches whose features were received."""
    items: int
    """Items of these batches."""
    splits: int
    """Calls whose inputs did not fit into shared memory at once, so that they became several batches."""
    input_bytes: int
    """Of inputs that were sent."""
    feature_bytes: int
    """Of features that were received."""
    held_bytes: int
    """Of shared memory now, inputs that the process has not released."""
    resident_bytes: int
    """Of the host's memory now, what shared memory for inputs takes."""


class Counters:
    """Sums, which several threads add to."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Add to counts by the names of their fields."""
        with self._lock:
            self._counts.update(counts)

    def snapshot(self, held_bytes: int, resident_bytes: int) -> ProcessStats:
        """The sums as they are, beside what is held now."""
        names = ("starts", "losses", "batches", "items", "splits", "input_bytes", "feature_bytes")
        with self._lock:
            counts = {name: self._counts[name] for name in names}
        return ProcessStats(**counts, held_bytes=held_bytes, resident_bytes=resident_bytes)


T = TypeVar("T")

_PATIENCE = 1e6
"""Seconds. Room comes free as the process encodes; if it ends, whoever waits is woken."""


class ProcessEncoder:
    """Encodes in a process that it starts, bounds and ends.

    Inputs and features cross in anonymous shared memory of `options.max_bytes` each way. Inputs that do not
    fit at once are encoded in several batches, one after another. Unlike a `FeatureEncoder` in general its
    methods may be called from several threads: while the process encodes one batch, the next is copied.

    The process's end is noticed at once: calls of `encode` that wait raise `EncoderLostError`, as does every
    later one until `start` or `restart` has started another process. Errors in the process keep their class.

    Args:
        program: which encoder.
        options: of the process.
        row_bytes: bytes of a feature's row by modality, where they are asked for before `start`.
    """

    def __init__(
        self,
        program: EncoderProgram,
        options: ProcessOptions | None = None,
        row_bytes: Mapping[Modality, int] | None = None,
    ) -> None:
        self.program = program
        self.options = options if options is not None else ProcessOptions()
        self._declared_row_bytes = dict(row_bytes) if row_bytes is not None else None
        self._row_bytes = self._declared_row_bytes
        self._process: EncoderProcess | None = None
        self._counters = Counters()
        self._numbers = itertools.count(START + 1)
        self._start_lock = threading.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether there is a process that may be asked to encode."""
        return self._process is not None and self._process.is_alive

    @property
    def pid(self) -> int | None:
        """The process's id, if there is one."""
        return self._process.pid if self._process is not None else None

    # --- starting and ending

    def start(self) -> None:
        """Start a process and its encoder; if one is alive, this does nothing.

        Raises:
            InputError: the program or the options are wrong.
            EncoderLostError: the process ended, or was not ready in time.
            Exception: what the program raised, of its own class.
        """
        with self._start_lock:
            if self.is_alive:
                return
            self._close_process()
            self._process = process = EncoderProcess(self.options, lambda: self._counters.add(losses=1))
            try:
                self._row_bytes = self._begin(process)
            except BaseException:
                self._close_process()
                raise
            self._counters.add(starts=1)

    def _begin(self, process: EncoderProcess) -> dict[Modality, int]:
        program, timeout = self.program, self.options.start_timeout
        with process.asking(START) as replies:
            process.connect()
            _expect(process.next_reply(replies, timeout), Hello)
            process.send(Start(program.factory, to_plain(program.arguments, "arguments")))
            started = _expect(process.next_reply(replies, timeout), Started)
        declared = self._declared_row_bytes
        if declared is not None and declared != started.row_bytes:
            raise InputError(f"row_bytes: expected the encoder's {started.row_bytes}; got {declared}")
        return started.row_bytes

    def restart(self) -> None:
        """End the process, if there is one, and start another; see `start`."""
        self.close()
        self.start()

    def close(self) -> None:
        """End the process and give back everything; idempotent, and `start` may follow.

        It may be called from another thread than `encode` or `start`, which then raise `EncoderLostError`.
        """
        process = self._process
        if process is not None:
            process.close()

    def _close_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    # --- encoding

    def predict_cost(self, item: PreparedItem) -> float:
        """The rows of the item's feature: what they cost only the process knows."""
        return float(item.num_tokens)

    def row_bytes(self, modality: Modality) -> int | None:
        """Bytes of one row of a feature; None: the encoder does not encode these.

        Raises:
            InputError: it was neither declared nor told yet by an encoder that was started.
        """
        if self._row_bytes is None:
            raise InputError("row_bytes: known once the encoder was started; declare it, or call start first")
        return self._row_bytes.get(modality)

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        """Features (rows, width), one per item and in order, in host memory of their own.

        Raises:
            EncoderLostError: the process is gone, or hung; `start` begins another.
            InputError: an item's inputs cannot be sent, or do not fit into `max_bytes`; nothing was.
            Exception: what the encoder raised, of its own class.
        """
        process = self._process
        if process is None:
            raise EncoderLostError("no encoder process was started; call start")
        process.check_alive()
        sizes = [process.transport.size_of(item.inputs) for item in items]
        turns = list(_turns(sizes, process.transport.max_bytes))
        if len(turns) > 1:
            self._counters.add(splits=1)
        features = [feature for turn in turns for feature in self._encode_turn(process, items[turn])]
        self._counters.add(
            batches=len(turns),
            items=len(items),
            input_bytes=sum(item.num_bytes for item in items),
            feature_bytes=sum(feature.nbytes for feature in features),
        )
        return features

    def _encode_turn(self, process: EncoderProcess, items: Sequence[PreparedItem]) -> list[Tensor]:
        number = next(self._numbers)
        features: dict[int, Tensor] = {}
        with process.asking(number) as replies:
            inputs = self._put(process, items)
            wire = [WireItem(item.modality, item.digest, item.num_tokens) for item in items]
            process.send(Encode(number, wire, inputs))
            is_last = False
            while not is_last:
                reply = _expect(process.next_reply(replies, self.options.encode_timeout), Encoded)
                self._read(process, reply, features)
                is_last = reply.is_last
        if features.keys() != set(range(len(items))):
            raise _distrust(process, f"{len(features)} features of {len(items)} items")
        return [features[index] for index in range(len(items))]

    def _put(self, process: EncoderProcess, items: Sequence[PreparedItem]) -> Handle:
        buffers = {
            f"{i}/{name}": tensor for i, item in enumerate(items) for name, tensor in item.inputs.items()
        }
        metadata = {"items": [item.metadata for item in items]}
        try:
            return process.transport.put(b"", buffers, metadata, timeout=_PATIENCE)
        except TransportError:
            process.check_alive()
            raise

    def _read(self, process: EncoderProcess, reply: Encoded, features: dict[int, Tensor]) -> None:
        """Copy the features of a reply, and let the process have their memory again."""
        for sent in reply.features:
            try:
                features[sent.index] = process.transport.get(sent.feature).buffers["feature"]
            except (TransportError, KeyError) as error:
                raise _distrust(process, str(error)) from error
            finally:
                process.transport.release(sent.feature)

    def stats(self) -> ProcessStats:
        """What was counted, over all processes of this encoder."""
        process = self._process
        return self._counters.snapshot(
            held_bytes=process.transport.held_bytes if process is not None else 0,
            resident_bytes=process.transport.resident_bytes if process is not None else 0,
        )


def _turns(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Runs of items whose inputs fit into memory together.

    Raises:
        InputError: one does not fit alone; before any run is given.
    """
    if sizes and max(sizes) > most:
        raise InputError(
            f"items: expected inputs of at most max_bytes={most} an item; got {max(sizes)} bytes"
        )
    start = held = 0
    for index, size in enumerate(sizes):
        if held + size > most:
            yield slice(start, index)
            start, held = index, 0
        held += size
    if len(sizes) > start:
        yield slice(start, len(sizes))


def _expect(reply: Hello | Started | Encoded, kind: type[T]) -> T:
    if not isinstance(reply, kind):
        raise TransportError(f"expected {kind.__name__} of the encoder process; got {type(reply).__name__}")
    return reply


def _distrust(process: EncoderProcess, what: str) -> EncoderLostError:
    """The error for a process that does not keep to the protocol. It is ended."""
    reason = f"the encoder process {process.pid} answered what was not asked: {what}"
    process.kill(reason)
    return EncoderLostError(reason)
