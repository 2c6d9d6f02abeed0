"""What a forward has to give to be captured at one size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.attention import KnownSegments
from fxsplit_encoder.capture.breakable import DEFAULT_SPLITTING_OPS
from fxsplit_encoder.capture.inputs import StaticInputs
from fxsplit_encoder.capture.parameters import StaticParameters
from fxsplit_encoder.parts import Parts

if TYPE_CHECKING:
    from fxsplit_encoder.compile import Bindings, Program


class RowCount:
    """The number of real rows, where the masks of a captured forward read it: a number on the device, and the
    same number here, so that it is written only where it changes.

    Captures of one size that never run at the same time may share it.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.tensor = torch.full((), rows, dtype=torch.int64, device=device)
        self._rows = rows

    def set(self, rows: int) -> None:
        """Takes effect for what is enqueued on the current stream from now on."""
        if rows != self._rows:
            self.tensor.fill_(rows)
            self._rows = rows


@dataclass(frozen=True, slots=True)
class ProgramBody:
    """A program of one size over static inputs."""

    program: Program
    bindings: Bindings
    """With the static inputs in their slots."""

    def __call__(self, segments: Iterable[KnownSegments] = ()) -> list[Any]:
        """Runs the region; `segments` as for `Program.finish`."""
        return self.program.finish(self.bindings.copy(), segments)


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """One size of a forward, ready to be captured."""

    inputs: StaticInputs
    body: ProgramBody | Callable[[], Sequence[Any]]
    """Runs over the tensors of `inputs`: a program, step by step, or a module's own code as it is."""
    parameters: StaticParameters
    rows: int | None
    """Tokens (rows) that the capture holds; None: it is never padded."""
    segment_inputs: Sequence[str] = ()
    """The inputs that are cumulative lengths of attention. Those of a module's own code are found when it is
    captured."""
    num_rows: RowCount | None = None
    single_segment: Callable[[], CaptureRequest] | None = None
    """Makes the same request for batches of one segment. Empty segments cost attention
    (benchmarks/cases/attention.py).
    """
    splitting_ops: Sequence[str] = DEFAULT_SPLITTING_OPS
    """Where a module's own code breaks in mode "breakable"."""
    is_alone: bool = False
    """Whether a module's own code may call no other rank: nobody sees to it that they capture the same."""
    lengths: Sequence[str] = ()
    """The inputs of a module's own code that look like cumulative lengths, whatever reads them."""

    @property
    def modes(self) -> list[str]:
        """The modes in which it can be captured."""
        if not isinstance(self.body, ProgramBody):
            return ["full", "breakable"]
        return ["full", "piecewise"] if self.body.program.splits else ["full"]

    def exact_body(self) -> Callable[[], Any]:
        """The body as it runs at the exact shape, on one segment as long as the rows."""
        single = self.single_segment() if self.single_segment is not None else self
        body = single.body
        if not isinstance(body, ProgramBody):
            return body
        rows = single.rows
        assert rows is not None
        lengths = [single.inputs.tensors[name] for name in single.segment_inputs]
        # Of frames, that is: windows, which are cut much finer, keep the bound that was traced.
        frames = [KnownSegments(each, [0, rows]) for each in lengths if each.shape[0] == 2]
        return functools.partial(body, frames)

    def runs(self) -> Parts[None]:
        """Runs, once each, what is run to time and to capture it on a device: whoever looks on learns which
        kernels it calls.
        """
        bodies: list[Callable[[], Any]] = [self.body, self.exact_body()]
        if self.single_segment is not None:
            bodies.append(self.single_segment().body)
        for body in bodies:
            yield None
            with torch.inference_mode(False), torch.no_grad():
                body()
