"""Replaces a tower's own forward by one that serves its calls from captures."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from fxsplit_encoder._torch.dynamo import is_traced
from fxsplit_encoder._torch.modes import foreign_around
from fxsplit_encoder._torch.transformers import selected_hidden_states
from fxsplit_encoder.caching import Recent
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError, UnsupportedTowerError, WeightsLayoutError
from fxsplit_encoder.hugging_face.calls import OUTPUT, PENDING, Made, Reads, accepts
from fxsplit_encoder.hugging_face.captured import CapturedTower, Served
from fxsplit_encoder.hugging_face.outputs import Lazy, LazyTuple, make_output
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.runtime.states import OtherStates
from fxsplit_encoder.runtime.statistics import ManagerStats, Statistics
from fxsplit_encoder.towers.base import matters, needs_gradients, settle
from fxsplit_encoder.towers.inputs import number_of

logger = logging.getLogger(__name__)

_MOST_LOGGED = 64

_warming = threading.local()


@contextlib.contextmanager
def capturing_at_once() -> Iterator[None]:
    """Inside, every call of a tower is captured before it is served."""
    _warming.on = True
    try:
        yield
    finally:
        _warming.on = False


@dataclass(frozen=True)
class FoundTower:
    """A tower in a model, by its dotted name, and the layers that the configuration around it reads."""

    name: str
    module: nn.Module
    layers: tuple[int, ...]
    calls: tuple[Any, Any] = field(compare=False)
    """Of `calls_of`."""


class ServedTower:
    """Serves a tower's calls from captures of a linked copy; others by the previous forward, counted by
    reason. A copy or a pickle of the tower has the previous forward.
    """

    _numbers: ClassVar = itertools.count()
    _by_number: ClassVar[weakref.WeakValueDictionary[int, ServedTower]] = weakref.WeakValueDictionary()

    def __init__(self, found: FoundTower, config: EncoderConfig, previous: Callable[..., Any] | None) -> None:
        self.name = found.name or "the model"
        self.config = config
        self.active = True
        self.number = next(self._numbers)
        self._module = found.module
        self._reads: Reads = frozenset(found.layers)
        """Layers and fields that the model reads; empty: the output."""
        self.previous = previous
        """The module's own previous forward; None: its class's."""
        self._defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(self.own_forward).parameters.items()
        }
        self._counted_name: str = found.calls[0].counted_name
        self._statistics = Statistics(log_interval=0)
        self._past: list[ManagerStats] = []
        self._lock = threading.RLock()
        self._logged: Recent[str, bool] = Recent(_MOST_LOGGED)
        self._captured = CapturedTower(self._module, self._reads, self.config, found.calls)
        self._others = OtherStates(self._release, config.max_graph_bytes)
        """Captures of states that the tower has left."""
        functools.update_wrapper(self, self.own_forward)
        self._by_number[self.number] = self

    def __reduce__(self) -> Any:
        if self.previous is not None:
            return functools.partial, (self.previous,)
        # Of a module that is still empty this is its class's.
        return getattr, (self._module, "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The tower's forward."""
        if not self.active or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return self.original(*args, **kwargs)
        if is_traced():
            _count_trace(self.number)
            return self.original(*args, **kwargs)
        given = {**dict(zip(self._defaults, args, strict=False)), **kwargs}
        try:
            served = self._serve(given)
        except WeightsLayoutError:
            served = self._serve(given, now=True)  # by new captures
        if isinstance(served, MissReason):
            self._count_own_forward(served, given)
            return self.original(*args, **kwargs)
        return served

    @property
    def own_forward(self) -> Callable[..., Any]:
        """The previous forward."""
        return self.previous or types.MethodType(type(self._module).forward, self._module)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the previous forward."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        # By the class: Dynamo does not trace a method that is bound here, as `own_forward` does.
        return type(self._module).forward(self._module, *args, **kwargs)

    # --- one call

    def _serve(self, given: dict[str, Any], *, now: bool = False) -> Any:
        """The output of a call, or why captures do not serve it. `now`: also captures a new size. Raises
        WeightsLayoutError if parameters have another layout, after the captures were released.
        """
        if (found := foreign_around()) is not None:
            self._warn_once(f"there is {found}")
            return MissReason.FOREIGN_CODE
        if torch.is_grad_enabled() and needs_gradients(given.values(), self._module):
            return MissReason.GRADIENTS
        captured = self._current()
        if (reason := self._refused(captured)) is not None or captured.calls is None:
            return reason
        try:
            own_matter = functools.partial(self._matters, captured)
            inputs, changing = settle(given, captured.calls.input_names, own_matter)
            (fields, states, is_tuple), selected = captured.asked(given), None
            # A tower that a rule serves may leave out of a tuple what an output has.
            leaves_out = is_tuple and fields and captured.seen[1] is not None
            changing |= {"return_dict": False} if leaves_out else {}
            if "hidden_states" in fields:
                captured, selected = self._reading(captured, states)
            call = captured.calls.read(inputs, changing)
            if isinstance(call, MissReason):
                self._warn_of_miss(call, changing)
                return call
            # A call may wait for others of its size in the tower's own forward, if that may serve it.
            at_once = getattr(_warming, "on", False) or now or self.config.invariant
            if not captured.serves(call, at_once=at_once):
                return MissReason.NEW_SHAPE
            served = captured.of(call.key)
            served.capture()
            items = served.manager.execute(captured.calls.inputs(call, served.manager.tower))
        except WeightsLayoutError as error:
            self._again(captured, error)
            raise
        except InputError as error:
            self._warn_once(str(error), "inputs")
            return MissReason.UNSUPPORTED_INPUT
        except UnsupportedTowerError as error:
            captured.refuse(error)
            return self._refused(captured)
        whole = Lazy(functools.partial(self._compute, given))
        read = functools.partial(self._read, captured, served, whole)
        made = served.make(call, items)
        values = _values(served, made, fields, selected, read, captured.calls.with_states)
        output = make_output(type(served.example), values)
        return output.to_tuple() if is_tuple else output

    def _matters(self, captured: CapturedTower, name: str, value: Any) -> bool:
        """Whether the tower's forward reads an argument that changes its fields, not the default's value."""
        if name in PENDING or not matters(name, value):
            return False
        default = self._defaults.get(name, inspect.Parameter.empty)
        is_default = isinstance(value, bool | int | float | str) and type(value) is type(default)
        return not (is_default and value == default) and captured.reads_argument(name)

    def _warn_of_miss(self, reason: MissReason, changing: Mapping[str, Any]) -> None:
        what = f"{', '.join(map(repr, changing))} changes the output; call it without"
        if reason != MissReason.OPTIONS:
            what = "captures take whole images of the shapes that the tower's configuration is for"
        self._warn_once(f"{reason}: {what}")

    # --- what the model reads

    def _reading(self, captured: CapturedTower, asked: Any) -> tuple[CapturedTower, list[int] | None]:
        """Captures that also make the layers that a call selects, and these; None: all."""
        selected, calls = selected_hidden_states(asked), captured.calls
        if selected is None or calls is None or not calls.makes_layers:
            return captured, selected
        count = calls.num_states
        layers = {layer % count for layer in selected if -count <= layer < count}
        if layers.issubset(calls.layers):
            return captured, selected
        self._learn(captured, layers)
        return self._current(), selected

    def _learn(self, captured: CapturedTower, what: Iterable[int | str]) -> None:
        """Adds fields or layers to what captures make from the next call on."""
        with self._lock:
            known = self._reads or frozenset(OUTPUT if captured.has_captures else ())
            self._reads = known.union(what)

    def _read(self, captured: CapturedTower, served: Served, whole: Lazy, what: int | str) -> Any:
        """A field, or the hidden state of a layer, that captures did not make."""
        output = whole.value()
        if captured.calls is not None and captured.calls.makes(what, served.example):
            self._learn(captured, {what})
        return output.hidden_states[what] if isinstance(what, int) else getattr(output, what)

    def _compute(self, given: dict[str, Any]) -> Any:
        self._count_own_forward(MissReason.UNCAPTURED_OUTPUT, given)
        with torch.no_grad(), torch.autocast(self._captured.device.type, enabled=False):
            returns_dict = {"return_dict": True} if accepts(self._module, "return_dict") else {}
            return self.original(**{**given, **returns_dict})

    def _count_own_forward(self, reason: MissReason, given: Mapping[str, Any]) -> None:
        """Counts a call of the tower's own forward; InputError with `invariant`, which forbids it."""
        if self.config.invariant:
            raise InputError(
                f"invariant: {self.name}: only the model's own forward serves this call ({reason}), and its "
                "bits depend on the batch; call it otherwise (docs/invariant.md), or leave invariant out"
            )
        self.record_miss(reason, max(1, number_of(given.get(self._counted_name))))

    # --- what is captured

    def _current(self) -> CapturedTower:
        """The captures, made anew where modules, dtype or device have changed."""
        captured = self._captured
        if not captured.is_current():
            captured = self._follow(captured)
        if captured.reads is not self._reads:
            return self._again(captured, f"the model also reads {self._reads - captured.reads}", logging.INFO)
        return captured

    def _follow(self, captured: CapturedTower) -> CapturedTower:
        """The captures of the tower's present state: these, kept ones or new ones."""
        with self._lock:
            if self._captured is not captured:  # another thread has done it
                return self._captured
            found = self._others.find(captured)
            if found is None or not found.is_current():  # of another device or dtype
                return self._again(captured, "the tower has changed", may_return=True)
            if found is not captured:
                self._others.put(captured, found)
                self._captured = found
            return found

    def _again(
        self, captured: CapturedTower, why: object, level: int = logging.WARNING, *, may_return: bool = False
    ) -> CapturedTower:
        """New captures in place of these, which are kept if their state `may_return`."""
        with self._lock:
            if self._captured is captured:  # no other thread has done it
                (self._others.put if may_return else self._release)(captured)
                seen = captured.seen if captured.is_current() else None
                self._captured = CapturedTower(self._module, self._reads, self.config, seen)
                if self._captured.refusal is None:
                    if captured.has_captures:
                        logger.log(level, "%s: captured again: %s", self.name, why)
                    self._others.make_room(captured.device)
            return self._captured

    def _release(self, captured: CapturedTower) -> None:
        captured.clear()
        self._past = [ManagerStats.total([*self._past, *captured.stats()])]

    def _refused(self, captured: CapturedTower) -> MissReason | None:
        """Why no call is served while the tower is as it is now; None: calls are served."""
        refusal = captured.refusal
        if refusal is None and (found := captured.in_training()) is not None:
            refusal = MissReason.TRAINING, f"{found} is in training mode"
        if refusal is not None:
            self._warn_once(refusal[1])
            return refusal[0]
        # On the device that the tower is on now: it may have been built on the meta device.
        return MissReason.AUTOCAST if torch.is_autocast_enabled(captured.device.type) else None

    def warm(self) -> None:
        """Captures the expected keys of the tower's configuration."""
        captured = self._current()
        if captured.calls is None:
            self._refused(captured)
        else:
            try:
                for key in captured.calls.expected_keys:
                    captured.of(key).capture()
            except UnsupportedTowerError as error:
                captured.refuse(error)
                self._refused(captured)

    def refresh(self) -> None:
        """`fxsplit_encoder.refresh` of the captures."""
        with self._lock:
            for captured in (self._captured, *self._others):
                captured.outdate_weights()

    def close(self) -> None:
        """Releases the captures; further calls go to the previous forward."""
        with self._lock:
            self.active = False
            self._others.clear()
            self._release(self._captured)

    # --- statistics

    def record_miss(self, reason: MissReason, items: int = 1) -> None:
        """Counts a call that the tower itself served."""
        self._statistics.record_items(items, reason)
        self._statistics.record_fallback("eager")

    def stats(self) -> ManagerStats:
        """The counts of all captures, and of the calls that the tower itself served."""
        captured = [self._captured, *self._others] if self.active else []
        own = [part for each in captured for part in each.stats()]
        return ManagerStats.total([self._statistics.snapshot(), *self._past, *own])

    def _warn_once(self, why: str, key: str | None = None) -> None:
        """Logs why calls go to the previous forward, once for each key or reason."""
        if self._logged.get(key or why) is None:
            self._logged[key or why] = True
            logger.warning("%s: encoded without captures: %s", self.name, why)


def _values(
    served: Served,
    made: Made,
    fields: set[str],
    selected: list[int] | None,
    read: Callable[[Any], Any],
    with_states: frozenset[str],
) -> dict[str, Any]:
    """The fields of the tower's output: those that captures made, and `Lazy` ones, which `read` computes.
    `fields` are those asked for by options, `selected` the numbers of hidden states; None: all.
    `with_states` are there only if hidden states are asked for.
    """
    values: dict[str, Any] = {}
    names = [*served.example]
    if "attentions" in fields and "attentions" in type(served.example).__dataclass_fields__:
        # They follow hidden states, also where a tower puts other fields after both.
        place = names.index("hidden_states") + 1 if "hidden_states" in names else len(names)
        names.insert(place, "attentions")
    for name in names:
        if name in made:
            values[name] = made[name]
        elif name in with_states and "hidden_states" not in fields:
            continue
        elif name != "hidden_states":
            values[name] = Lazy(functools.partial(read, name))
        else:
            count = len(served.example.hidden_states)
            numbers = range(count) if selected is None else selected
            chosen = {n % count for n in numbers if -count <= n < count}
            values[name] = LazyTuple(
                made.get(n, Lazy(functools.partial(read, n))) if n in chosen else None for n in range(count)
            )
    return values


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _count_trace(number: int) -> None:
    ServedTower._by_number[number].record_miss(MissReason.OUTER_TRACE)
