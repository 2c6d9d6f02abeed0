"""One path of a tower, at one combination of capture axes: how a batch runs on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.attention import KnownSegments
from fxsplit_encoder.capture import BudgetLadder, CapturedForward
from fxsplit_encoder.capture.buffers import StaticValue
from fxsplit_encoder.capture.runner import ExactRunner
from fxsplit_encoder.compile import BoundProgram
from fxsplit_encoder.errors import FxSplitError, ReplayError
from fxsplit_encoder.manager.path_captures import PathCaptures
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.planning.limits import CaptureKey
from fxsplit_encoder.planning.plan import PathPlan


class EncoderPath(PathCaptures):
    """One path, for items of one combination of axis keys: its captures, and how a batch runs on it."""

    def values(self, mm_kwargs: dict[str, Any]) -> dict[str, StaticValue | None]:
        """What a replay, or a run at the exact shape, needs of a batch.

        Raises:
            ReplayError: the tower cannot make it within the captured extents, of a video of more frames say.
        """
        items, frames = self.limits.max_items_per_batch, self.limits.max_frames_per_batch
        try:
            prepared = self.tower.prepare_encoder_cudagraph_replay_buffers(
                mm_kwargs, items, frames, path=self.name
            )
        except (FxSplitError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError) as error:  # of a copy into a tensor of that extent, say
            raise ReplayError(
                f"the tower makes no inputs of this batch within {items} items and {frames} video frames: "
                f"{type(error).__name__}: {error}"
            ) from error
        return dict(prepared.values)

    def captures_for(self, planned: PathPlan) -> Iterator[tuple[CaptureKey, BudgetLadder, int]]:
        """What may serve a planned batch, the best first: a capture's key, what holds it, and its size."""
        if self.exact is not None and (ladder := self.exact.find(planned)) is not None:
            yield self.key(0), ladder, planned.tokens
        if planned.budget is not None and planned.budget in self.captured:
            yield self.key(planned.budget), self.ladder, planned.budget

    def best_capture(
        self, ladder: BudgetLadder, size: int, values: Mapping[str, StaticValue | None]
    ) -> CapturedForward:
        """What to replay of a captured size for a batch.

        Raises:
            ReplayError: the tower gave no value for a buffer of the capture (capture rule 4).
        """
        name = self.program.frame_lengths if self.program is not None else None
        lengths = values.get(name) if name is not None else None
        single = isinstance(lengths, torch.Tensor) and lengths.shape[0] == 2
        captured = ladder.best(size, 1 if single else None)
        captured.inputs.check_complete(values)
        return captured

    def as_served(self, planned: PathPlan) -> PathPlan:
        """A plan with what captures at exact shapes would change of it now."""
        if self.exact is None or planned.skipped:
            return planned
        if planned.tokens in self.exact.shapes:
            return PathPlan(planned.tokens, planned.tokens)
        return planned if planned.budget is not None else planned._replace(reason=self.miss_reason(planned))

    def miss_reason(self, planned: PathPlan) -> MissReason:
        """Why a planned batch that nothing served counts as a miss."""
        reason = self.exact.reason(planned) if self.exact is not None else None
        reason = reason or planned.reason or MissReason.NOT_CAPTURED
        if reason is MissReason.NOT_CAPTURED and self.padding_refused:
            return MissReason.PADDING_UNPROVED
        return reason

    def load(self, captured: CapturedForward, values: Mapping[str, StaticValue | None]) -> None:
        """Fills a capture's buffers with a batch.

        Raises:
            ReplayError: the batch does not fit the capture; nothing was copied then (capture rule 3).
        """
        captured.load(values, self.forward.rows(values))

    def replay(self, captured: CapturedForward, *, debug: bool = False) -> list[Any]:
        """Runs a capture on what was loaded; returns its outputs, which the next replay overwrites.

        Parameters are looked at while the device works: where other forms of them are kept, and they have
        changed, the capture runs once more on the new ones.

        Raises:
            InputError: parameters are inference tensors, whose changes cannot be seen.
            ReplayError: a captured address has changed, or another rule was found broken.
        """
        derived = self.program.program.derived if self.program is not None else None
        if debug and derived is not None:
            derived.refresh()
        outputs = captured.replay(debug=debug)
        if derived is not None and derived.refresh():
            outputs = captured.replay(debug=debug)
        return outputs

    def runs_compiled(self, planned: PathPlan) -> bool:
        """Whether a planned batch that is not replayed goes through the compiled program."""
        return not planned.eager and self.forward.current_program() is not None

    def run_exact(
        self, mm_kwargs: dict[str, Any], values: Mapping[str, StaticValue | None]
    ) -> tuple[Tensor, bool]:
        """The batch at its exact shape, and whether the compiled program ran: where its assumptions do not
        hold, the tower runs eagerly.
        """
        program = self.forward.current_program()
        if program is not None:
            inputs = self.forward.inputs(program, values)
            if inputs.keys() >= set(program.names) - {None} and self._accepts(program, inputs):
                segments = [
                    KnownSegments(inputs[name], cu_seqlens.tolist())
                    for name in program.segment_inputs
                    if isinstance(cu_seqlens := values[name], torch.Tensor) and not cu_seqlens.is_cuda
                ]
                return program(inputs, ExactRunner(segments)), True
        return self.run_eager(mm_kwargs), False

    def run_eager(self, mm_kwargs: dict[str, Any]) -> Tensor:
        """The batch through the tower itself."""
        return self.tower.encoder_eager_forward(mm_kwargs, path=self.name)

    def _accepts(self, program: BoundProgram, inputs: Mapping[str, Tensor]) -> bool:
        return program.program.accepts(program.symbols(inputs))
