"""The states of a manager's captures: none, the first ones, then all of them."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from contextvars import Token
from pathlib import Path

import torch

from fxsplit_encoder._torch.device import ALREADY, on_device
from fxsplit_encoder._torch.modes import foreign_around, without_autograd
from fxsplit_encoder._torch.peft import unmerging_layer
from fxsplit_encoder._torch.structure import Structure
from fxsplit_encoder.errors import InputError, StartFileError, TowerChangedError, WeightsMovedError
from fxsplit_encoder.kernels import compile_jobs
from fxsplit_encoder.kernels.attention import KernelChooser
from fxsplit_encoder.manager.background import BackgroundCapture
from fxsplit_encoder.manager.generation import Generation, first_of
from fxsplit_encoder.manager.start import expect_costs, keep_costs, load_start, save_start
from fxsplit_encoder.manager.tower import tower_part
from fxsplit_encoder.manager.turns import Turns, WorkBetween, compare_ahead
from fxsplit_encoder.pauses import StoppedError, pausing_by
from fxsplit_encoder.planning.plan import MissReason, Plan
from fxsplit_encoder.runtime.captured_program import Choosers
from fxsplit_encoder.runtime.requests import WeightChecks
from fxsplit_encoder.runtime.states import OtherStates

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Is called with (done, total)."""


class Lifecycle(ABC):
    """Captures a tower's forwards, at once or in steps between requests, and holds the captures that serve,
    in the end those of `own`, and those of other states of the tower: the part of
    `EncoderCudaGraphManager` under its requests.
    """

    def __init__(self, own: Generation, kernels: Choosers) -> None:
        self.kernels = kernels
        self._own = own
        """The generation of the tower's present state."""
        self._others = OtherStates(Generation.forget_tower, own.config.max_graph_bytes)
        """Complete generations of states that the tower has left."""
        others = weakref.ref(self._others)  # without a cycle, which would keep memory
        own.captures.bytes_elsewhere = lambda: 0 if (kept := others()) is None else kept.num_bytes
        self._serving = own
        """The generation that serves: the first captures, until `own` is captured."""
        self._turns = Turns()
        self._background: BackgroundCapture | None = None
        self._is_captured = False
        """Whether anything was captured since the last `clear`."""
        self._has_adapters = False
        """Whether layers of the tower may compute with other adapters from request to request."""
        self._start_notes: list[str] = []
        """Why a saved start is not used."""
        self._start_read = False
        self._looks = WeightChecks(own.config.weight_check_seconds)
        self._said: set[str] = set()
        """Why requests were left to the tower."""

    @property
    def _is_complete(self) -> bool:
        """Whether everything is captured."""
        return self._is_captured and self._serving is self._own

    def _generations(self) -> set[Generation]:
        """Returns those of every state of the tower, and the one that still serves."""
        return {self._serving, self._own, *self._others}

    def compile(self, progress: Progress | None = None) -> None:
        """Traces and compiles every path; `progress` gets (done, total): two phases and every piece."""
        self.wait_captured()
        with self._turns, on_device(self._own.pool.device), without_autograd():
            self._take_structure()
            self._read_start()
            self._own.compile(progress)

    def _prepare(self) -> Sequence[tuple[Hashable, int]]:
        """Compiles and measures, with the lock; returns the (path key, budget) pairs to capture in `own`."""
        self._own.run_in(torch.is_inference_mode_enabled())
        planned = self._own.planned_captures()
        logger.info("%s", planned)
        self.compile()
        if self._own.scope.measured and self._own.scope.compares_kernels:
            compile_jobs.begin_no_more()
            if compile_jobs.is_running():  # what waits for none of them is compared first
                compare_ahead(lambda: self._own.run(planned), self._own.pool.device)
        return self._own.prepare(planned)

    def _capture_first(self, progress: Progress | None = None) -> None:
        """Captures a few budgets of the tower's own forward, and starts the background capture."""
        with serving_scope(self._turns, self.kernels, self._own.pool.device):
            self._take_structure()  # which gives up captures of other modules
            if self._is_captured:
                return
            self._read_start()
        first, in_inference_mode = self._own.uncompiled(), torch.is_inference_mode_enabled()
        # Stops where another thread has captured since this one began.
        work = WorkBetween(self._turns, lambda: self._is_captured, at_once=True)
        on_its_device = on_device(first.pool.device)
        try:
            with self.kernels.choosing(), on_its_device, without_autograd(), pausing_by(work), work.turn():
                for generation in (first, self._own):
                    generation.run_in(in_inference_mode)
                first.structure = self._own.structure
                planned = self._own.planned_captures()
                first.captures.capture(first.prepare(first_of(first.planned_captures())), progress)
                self._serve(first)
                self._background = BackgroundCapture(
                    self._own, planned, first, self._turns, self.kernels, weakref.WeakMethod(self._switch)
                )
                weakref.finalize(self, self._background.stop).atexit = False
                self._background.start()
        except StoppedError:
            with self._turns:
                first.clear()

    def _switch(self) -> None:
        """Makes `own` serve, as far as it is captured, and releases what served before."""
        before = self._serving
        try:
            self._own.check_tower()
        except TowerChangedError:
            self._forget()  # some of it was captured of another state
            raise
        self._serve(self._own)
        if self._keeps_costs:
            keep_costs(self._own, self.kernels.measurements)
        if before is not self._own:
            before.clear()

    def _serve(self, generation: Generation, *, captured: bool = True) -> None:
        self._serving, self._is_captured = generation, captured
        self._use_captures()

    @abstractmethod
    def _use_captures(self) -> None:
        """Is called with the lock when others serve."""

    def wait_captured(self, timeout: float | None = None) -> bool:
        """Waits for the work behind `capture(wait=False)`, and lets its captures be made; returns
        whether it is over, see `stats().progress`. After `timeout` seconds it begins no further capture.
        """
        return self._background is None or self._background.wait(timeout)

    def clear(self) -> None:
        """Releases every capture and its memory, and ends work behind `capture(wait=False)`."""
        if self._background is not None:
            self._background.stop()
        with self._turns:
            self._others.clear()
            for generation in {self._serving, self._own}:
                generation.clear()
            self._serve(self._own, captured=False)

    # --- the tower's modules

    def _allowed(self, plan: Plan) -> Plan:
        """Returns a request's plan, or one by the tower's own forward where captures may not serve."""
        structure, device = self._own.structure, self._own.pool.device
        if (found := foreign_around()) is not None:
            reason, why = MissReason.FOREIGN_CODE, f"there is {found}"
        elif structure is not None and (found := structure.in_training()) is not None:
            reason, why = MissReason.TRAINING, f"{found} is in training mode"
        elif torch.is_autocast_enabled(device.type):
            reason, why = MissReason.AUTOCAST, "there is torch.autocast"
        else:
            return plan
        if why not in self._said:
            self._said.add(why)
            logger.warning("items are encoded by the tower's own forward: %s", why)
        return plan.by_the_tower(reason)

    def _check_tower(self) -> None:
        """Raises TowerChangedError, every `weight_check_seconds`, if the tower's modules have changed."""
        structure, looks = self._own.structure, self._looks
        if structure is None or not (looks.are_always_due or looks.is_due("")) or structure.is_current():
            return
        if self._others.find(self._own) is self._own:
            return
        self._looks.all_are_due()  # what was found is there until it is mended
        if self._background is not None and not self._background.progress.is_over:
            self._forget()  # what is captured in steps may be of either state
        self._own.check_tower()  # raises, unless another thread undid it

    def _follow_adapters(self) -> None:
        """Makes kept captures serve, if the tower's layers compute with other adapters than before.
        TowerChangedError: there are none for these, or other ranks may not have them.
        """
        structure = self._own.structure
        if structure is None or not structure.has_other_adapters():
            return
        if self._own.scope.agree is not None or not self._take_kept():
            self._looks.all_are_due()
            self._check_tower()

    def _take_structure(self) -> None:
        """Notes the tower's modules, and puts captures of others aside. The caller holds the lock."""
        if torch.is_autocast_enabled(self._own.pool.device.type):
            raise InputError("torch.autocast: captures would keep its casts; call this outside of it")
        structure = self._own.structure
        if structure is not None and not self._take_kept() and (change := structure.change()):
            logger.warning("capturing again: %s", change)
            if self._is_complete and structure.has_other_adapters():
                left, self._own = self._own, self._own.again()
                self._own.captures.bytes_elsewhere = left.captures.bytes_elsewhere
                self._others.put(left)
                if left.scope.agree is None:  # bytes are not the same on all ranks, which keep the same
                    self._others.make_room(left.pool.device)
                self._serve(self._own, captured=False)
            else:
                self._forget()
                self._own.structure = None
        if self._own.structure is None and (part := tower_part(self._own.spec.tower)) is not None:
            if (layer := unmerging_layer(part)) is not None:
                raise InputError(
                    f"the tower: expected adapters that are merged or disabled; got {layer}, which is both: "
                    "its forward would unmerge them. Call unmerge() first"
                )
            self._own.structure = Structure(part)
            self._has_adapters = self._own.structure.has_adapters
        structure = self._own.structure
        if structure is not None and (name := structure.in_training()) is not None:
            raise InputError(
                f"the tower: expected every module in evaluation mode; got {name} in training mode, which "
                "captures would compute in. Call eval() first"
            )

    def _forget(self) -> None:
        """Gives up what the present captures are, or are to be."""
        if self._background is not None:
            self._background.stop()
        for generation in {self._serving, self._own}:
            generation.forget_tower()
        self._serve(self._own, captured=False)

    def _take_kept(self) -> bool:
        """Makes kept captures of the tower's state serve; returns whether they did not and do now."""
        left = self._own
        if left.structure is None or left.structure.is_current():
            return False
        found = self._others.find(left)
        if found is None or found is left:
            return False
        if self._is_complete:
            self._others.put(left, found)
        else:
            self._forget()
            self._others.take(found)
        found.runner.in_inference_mode = self._serving.runner.in_inference_mode  # of a request in hand
        self._own = found
        self._serve(found)
        return True

    def _capture_again(self, error: WeightsMovedError) -> None:
        """Captures again what serves, over the tower's parameters now. The caller holds the lock. InputError:
        the program was compiled for other layouts. WeightsMovedError: ranks share the tower's weights, and
        may not all have seen the error. TowerChangedError: the modules have changed too.
        """
        if self._own.scope.agree is not None:
            raise error
        self._own.check_tower()
        for path in self._serving.paths_by_key.values():
            path.current_program()
        logger.warning("capturing again: %s", error)
        held = self._serving.captures.held()
        self._serving.captures.clear()
        self._serving.captures.capture(held)
        self._serve(self._serving)

    # --- a saved start

    def save_start(self, path: str | os.PathLike[str]) -> int:
        """Writes a file with which other processes start on devices of the same kind without compiling or
        measuring; returns its bytes. Replaces the file as a whole, after the end of `capture(wait=False)`.

        Raises:
            InputError: nothing was captured yet, or the file cannot be written.
        """
        self.wait_captured()
        with self._turns:
            if not self._is_complete:
                raise InputError("save_start: nothing was compiled or measured yet; call capture() first")
            num_bytes, unsaved = save_start(self._own, self.kernels.measurements, Path(path))
        for label, why in unsaved.items():
            logger.warning("%s: a start from %s will trace it again: %s", label, path, why)
        return num_bytes

    def load_start(self, path: str | os.PathLike[str]) -> bool:
        """Makes `compile` and `capture` use a file of `save_start`; returns whether it is used. It holds
        compiled code, so its source must be trusted. A file that is damaged, or was made by another GPU,
        version, tower or configuration, is ignored; a warning and `reports` name what differs.

        Raises:
            InputError: captures are there already.
        """
        with self._turns:
            if self._is_captured:
                raise InputError("load_start: everything is captured already; call it before capture()")
            self._start_read = True
            try:
                load_start(self._own, self.kernels.measurements, Path(path))
            except StartFileError as error:
                self._start_notes = [f"the start in {path} is not used: {error}"]
                logger.warning("%s", self._start_notes[0])
                return False
            self._start_notes = []
            return True

    def _read_start(self) -> None:
        if self._start_read:
            return
        self._start_read = True
        path = self._own.config.start_file
        if (path is None or not self.load_start(path)) and self._keeps_costs:
            expect_costs(self._own, self.kernels.measurements)

    @property
    def _keeps_costs(self) -> bool:
        # Ranks have to measure, or not, together.
        return self._own.is_measured and self._own.pool.is_cuda and self._own.scope.agree is None


# Entered for every request: four contexts in one `with` take twice as many calls.
class serving_scope:
    """Enters `turns`, `kernels.choosing()`, `on_device` and `without_autograd`."""

    __slots__ = ("_autograd", "_chooser", "_device", "_elsewhere", "_token", "_turns")

    def __init__(self, turns: Turns, kernels: Choosers, device: torch.device) -> None:
        self._turns = turns
        self._chooser = kernels.attention
        self._device = device

    def __enter__(self) -> None:
        self._turns.__enter__()
        has_entered = False
        try:
            self._elsewhere: AbstractContextManager[object] = on_device(self._device)
            if self._elsewhere is not ALREADY:
                self._elsewhere.__enter__()
            self._token: Token[KernelChooser] = self._chooser.current.set(self._chooser)
            self._autograd = without_autograd()
            self._autograd.__enter__()
            has_entered = True
        finally:
            if not has_entered:
                self._turns.__exit__(*sys.exc_info())

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            self._autograd.__exit__()
            self._chooser.current.reset(self._token)
            if self._elsewhere is not ALREADY:
                self._elsewhere.__exit__(None, None, None)
        finally:
            self._turns.__exit__(kind, *raised)
