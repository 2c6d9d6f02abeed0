"""The forward that stands in the place of a tower's own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fxsplit_encoder._torch.transformers import attention_implementation
from fxsplit_encoder.errors import InputError, WeightsLayoutError
from fxsplit_encoder.integrations.hugging_face.calls import Call, Made, asked_for
from fxsplit_encoder.integrations.hugging_face.captured import CapturedTower, Settings
from fxsplit_encoder.integrations.hugging_face.families import calls_of
from fxsplit_encoder.integrations.hugging_face.find import FoundTower
from fxsplit_encoder.integrations.hugging_face.outputs import HiddenStates, make_output
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.runtime.statistics import ManagerStats, Statistics
from fxsplit_encoder.towers.options import Options, matters, settle

logger = logging.getLogger(__name__)

_EXACT_ATTENTION = frozenset({None, "eager", "sdpa", "flex_attention"})
"""Attention that computes what ours does, beside every flash attention."""

_ASKED = frozenset({"hidden_states", "attentions"})
"""Fields that an output has only where they are asked for."""

_warming = threading.local()
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, ServedTower] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def capturing_at_once() -> Iterator[None]:
    """Inside, whatever a tower is called with is captured before the call is served."""
    _warming.on = True
    try:
        yield
    finally:
        _warming.on = False


class ServedTower:
    """Encodes a tower's calls by captures; those that captures cannot serve by the forward that was there
    before it, counted by why.

    The tower itself stays as it is: parameters, configuration and submodules are untouched, and captures are
    made of a copy of its modules on the same parameters. A copy or a pickle of the tower has the forward that
    was there before.
    """

    def __init__(self, found: FoundTower, settings: Settings, previous: Callable[..., Any] | None) -> None:
        self.name = found.name
        self.settings = settings
        self.active = True
        self.number = next(_numbers)
        self._module = found.module
        self._layers = found.layers
        self.previous = previous
        """The forward that the module had for itself; None: its class's."""
        self._parameter_names = list(inspect.signature(self.own_forward).parameters)
        self._num_items = calls_of(found.module).num_items
        self._statistics = Statistics(log_interval=0)
        self._past: list[ManagerStats] = []
        self._lock = threading.RLock()
        self._told: set[str] = set()
        self._captured = self._capture()
        functools.update_wrapper(self, self.own_forward)
        _by_number[self.number] = self

    def __reduce__(self) -> Any:
        if self.previous is not None:
            return functools.partial, (self.previous,)
        # Of a module that is still empty this is its class's.
        return getattr, (self._module, "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The tower's forward."""
        if not self.active or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            _count_trace(self.number)
            return self.original(*args, **kwargs)
        given = {**dict(zip(self._parameter_names, args, strict=False)), **kwargs}
        served = self._serve(given)
        if isinstance(served, MissReason):
            self._refuse_own_forward(served)
            self.record_miss(served, self._num_items(given))
            return self.original(*args, **kwargs)
        return served

    @property
    def own_forward(self) -> Callable[..., Any]:
        """The forward that was there before."""
        return self.previous or types.MethodType(type(self._module).forward, self._module)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        # By the class: Dynamo does not trace a method that is bound here, as `own_forward` does.
        return type(self._module).forward(self._module, *args, **kwargs)

    # --- one call

    def _serve(self, given: dict[str, Any]) -> Any:
        """The output of a call with these arguments, or why captures do not serve it."""
        reason = self._condition(given)
        if reason is not None:
            return reason
        captured = self._current()
        if captured.calls is None:
            return self._refused(captured)
        options = settle(given, captured.calls.input_names, matters)
        try:
            fields, changing = asked_for(given, options.changing, self._module.config)
            call = captured.calls.read(options.kept, changing)
            if isinstance(call, MissReason):
                return call
            at_once = getattr(_warming, "on", False)
            # With `invariant` no call may wait for others of its size in the tower's own forward.
            if not captured.serves(call, at_once=at_once or self.settings.config.invariant):
                return MissReason.NEW_SHAPE
            if at_once:
                captured.of(call.key).runner.capture()
            captured, example, items = self._run(captured, call)
        except WeightsLayoutError:
            raise
        except InputError as error:
            self._tell(logging.INFO, f"{self.name}: encoded without a capture: {error}")
            return MissReason.UNSUPPORTED_INPUT
        assert captured.calls is not None
        whole = functools.cache(functools.partial(self._compute, given))
        made = captured.calls.make(call, items, example)
        output = _output(example, made, fields, whole)
        return output if _returns_dict(options, given, self._module.config) else output.to_tuple()

    def _condition(self, given: Mapping[str, Any]) -> MissReason | None:
        """Why the tower itself serves every call that is made as this one is."""
        module = self._module
        if module.training or (torch.is_grad_enabled() and _needs_gradients(module, given)):
            return MissReason.GRADIENTS
        if torch.is_autocast_enabled(self._captured.device.type):
            return MissReason.AUTOCAST
        implementation = attention_implementation(getattr(module, "config", None))
        if implementation not in _EXACT_ATTENTION and "flash" not in str(implementation):
            self._tell(logging.WARNING, f"{self.name}: encoded without captures: {implementation} attention")
            return MissReason.FOREIGN_CODE
        return None

    def _run(self, captured: CapturedTower, call: Call) -> tuple[CapturedTower, Any, Any]:
        try:
            return captured, *captured.run(call)
        except WeightsLayoutError as error:
            captured = self._again(captured, error)
            return captured, *captured.run(call)

    def _compute(self, given: dict[str, Any]) -> Any:
        """The tower's own output, for fields that captures do not make."""
        self._refuse_own_forward(MissReason.UNCAPTURED_OUTPUT)
        self.record_miss(MissReason.UNCAPTURED_OUTPUT, self._num_items(given))
        with torch.no_grad(), torch.autocast(self._captured.device.type, enabled=False):
            return self.original(**{**given, "return_dict": True})

    def _refuse_own_forward(self, reason: MissReason) -> None:
        """Raises InputError where the tower's own forward may not serve a call."""
        if self.settings.config.invariant:
            raise InputError(
                f"invariant: {self.name}: only the model's own forward serves this call ({reason}), and its "
                "bits depend on the batch; call it otherwise (docs/invariant.md), or leave invariant out"
            )

    # --- what is captured

    def _capture(self) -> CapturedTower:
        return CapturedTower(self._module, self._layers, self.settings)

    def _current(self) -> CapturedTower:
        """What the tower is captured as now: where modules, dtype or device have changed, anew."""
        captured = self._captured
        return captured if captured.is_current() else self._again(captured, "the tower has changed")

    def _again(self, captured: CapturedTower, why: object) -> CapturedTower:
        with self._lock:
            if self._captured is captured:  # no other thread has done it
                if captured.has_captures:
                    logger.warning("%s: captures are given up, for new ones: %s", self.name, why)
                self._release()
                self._captured = self._capture()
            return self._captured

    def _release(self) -> None:
        self._captured.clear()
        self._past += self._captured.stats()

    def _refused(self, captured: CapturedTower) -> MissReason:
        assert captured.refusal is not None
        reason, why = captured.refusal
        self._tell(logging.WARNING, f"{self.name}: encoded without captures: {why}")
        return reason

    def warm(self) -> None:
        """Captures what calls that the configuration is for need."""
        captured = self._current()
        if captured.calls is None:
            self._refused(captured)
        else:
            for key in captured.calls.expected_keys:
                captured.of(key).runner.capture()

    def close(self) -> None:
        """Gives the memory back; from now on this is the forward that was there before."""
        with self._lock:
            self.active = False
            self._release()

    # --- what is counted

    def record_miss(self, reason: MissReason, items: int = 1) -> None:
        """Counts a call that the tower itself served."""
        self._statistics.record_items(items, reason)
        self._statistics.record_fallback("eager")

    def stats(self) -> ManagerStats:
        """The counts of all captures, and of the calls that the tower itself served."""
        captured = self._captured.stats() if self.active else []
        return ManagerStats.total([self._statistics.snapshot(), *self._past, *captured])

    def _tell(self, level: int, message: str) -> None:
        """Logs a message once."""
        if message not in self._told:
            self._told.add(message)
            logger.log(level, "%s", message)


def _output(example: Any, made: Made, fields: set[str], whole: Callable[[], Any]) -> Any:
    """The tower's output of what captures made, of which other fields are computed once they are read.

    Args:
        fields: those that were asked for beside the ones that the example has anyway.
    """
    ready = dict(made.fields)
    pending = ({*example.keys()} - _ASKED - ready.keys()) | fields
    if made.layers and "hidden_states" in fields:
        count = len(example.hidden_states)
        ready["hidden_states"] = HiddenStates(made.layers, count, lambda: whole().hidden_states)
        pending -= {"hidden_states"}
    return make_output(type(example), ready, pending, whole)


def _returns_dict(options: Options, given: Mapping[str, Any], config: Any) -> bool:
    if given.get("return_dict") is None:
        return getattr(config, "return_dict", True) is not False
    return options.returns_dict


def _needs_gradients(module: nn.Module, inputs: Mapping[str, Any]) -> bool:
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    return any(tensor.requires_grad for tensor in (*tensors, *module.parameters()))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _count_trace(number: int) -> None:
    _by_number[number].record_miss(MissReason.OUTER_TRACE)
