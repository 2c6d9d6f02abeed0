"""Capture requests of plain functions, as programs of one piece; and CUDA as far as captures go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from fxsplit_encoder.capture.buffers import StaticBuffer
from fxsplit_encoder.capture.forward import CaptureRequest, ProgramBody
from fxsplit_encoder.capture.inputs import StaticInputs
from fxsplit_encoder.capture.parameters import StaticParameters
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.compile.branches import Step
from fxsplit_encoder.compile.padding import PaddingReport
from fxsplit_encoder.compile.program import Bindings, Program, Ref

CPU = torch.device("cpu")


def piece(call: Callable[..., Any], args: Sequence[Any] = (), outputs: tuple[int, ...] = ()) -> Step:
    """A piece; `call` returns a sequence."""
    return Step("piece", "piece", call, tuple(args), {}, outputs)


def split(call: Callable[..., Any], args: Sequence[Any] = (), output: int = -1, **kwargs: Any) -> Step:
    """A splitting op, which returns one value."""
    return Step("split", "split", call, tuple(args), kwargs, (output,))


def body_of(steps: Sequence[Step], outputs: Sequence[int]) -> ProgramBody:
    """A program of these steps, which returns the values of some slots."""
    num_slots = 1 + max([*(slot for step in steps for slot in step.outputs), *outputs, 0])
    program = Program(
        steps=tuple(steps),
        num_inputs=0,
        num_slots=num_slots,
        num_rows_slot=None,
        constants={},
        static_inputs=frozenset(),
        symbol_sources=(),
        outputs=tuple(map(Ref, outputs)),
        output_shapes=(None,) * len(outputs),
        input_shapes=(),
        token_symbol=None,
        region_start=0,
        region_inputs=(),
        region_symbols=(),
        device=CPU,
        padding=PaddingReport(()),
        accepts=lambda symbols: True,
    )
    return ProgramBody(program, Bindings([None] * num_slots))


def body_calling(call: Callable[[], Sequence[Any]], *, can_break: bool = False) -> ProgramBody:
    """A program of one piece; with a splitting op that does nothing after it, if it can break."""
    return body_of([piece(call, outputs=(0,)), *([split(lambda: None)] if can_break else [])], (0,))


def request_of(
    body: ProgramBody | Callable[[], Sequence[Any]],
    rows: int | None = 4,
    buffers: Iterable[StaticBuffer] = (),
    **fields: Any,
) -> CaptureRequest:
    """The request of a body over some static inputs."""
    return CaptureRequest(StaticInputs(buffers), body, StaticParameters([]), rows, **fields)


class FakeCuda:
    """What happens to graphs and streams is noted; a graph ends only on the stream that it began on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.current = FakeStream(self, "stream")
        self.capturing: list[FakeStream] = []
        """The streams on which graphs have begun."""
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 100)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)

    @contextlib.contextmanager
    def entered(self, stream: FakeStream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def pool(self, stream: Any = None) -> GraphPool:
        """A pool that takes the path of a device."""
        pool = GraphPool(CPU, stream=stream)
        pool.is_cuda = True
        return pool


class FakeStream:
    device = torch.device("cuda", 0)

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.events.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: object) -> None:
        self.cuda.events.append(f"{self.name} waits")

    def synchronize(self) -> None:
        self.cuda.events.append("synchronize")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self.cuda.events.append(f"record {stream.name}")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def capture_begin(self, **_: object) -> None:
        self.cuda.events.append("begin")
        self.cuda.capturing.append(self.cuda.current)

    def capture_end(self) -> None:
        if self.cuda.capturing[-1] is not self.cuda.current:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self.cuda.events.append("end")
        self.cuda.capturing.pop()

    def replay(self) -> None:
        self.cuda.events.append("replay")
