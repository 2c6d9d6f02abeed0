"""Captures of a tower: a manager for each key of its calls, until the tower changes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fxsplit_encoder._torch.dispatch import tree_leaves, tree_map_only
from fxsplit_encoder._torch.peft import unmerging_layer
from fxsplit_encoder._torch.structure import Structure
from fxsplit_encoder._torch.transformers import attention_implementation
from fxsplit_encoder.caching import Recent
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError, UnsupportedTowerError
from fxsplit_encoder.hugging_face.calls import PENDING, Call, Maker, Reads, twin_of
from fxsplit_encoder.hugging_face.outputs import make_output
from fxsplit_encoder.hugging_face.rules import calls_of
from fxsplit_encoder.manager import EncoderCudaGraphManager
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.runtime.statistics import ManagerStats
from fxsplit_encoder.towers.base import first_parameter
from fxsplit_encoder.towers.rules import MODEL_ERRORS

_MOST_KEYS = 8
"""Sizes of images that are captured for one tower at a time; calls of others go to the tower itself."""

_MOST_SEEN = 256
"""Sizes whose last calls, and arguments whose effect is known of one tower."""

_EXACT_ATTENTION = frozenset({None, "eager", "sdpa", "flex_attention"})
"""Implementations that compute exact attention, besides every flash attention."""

_PAYS = 64
"""Calls that pay for a capture. After a replacement that was used less, the next waits twice as long."""


@dataclass
class Served:
    """The captures of one key."""

    manager: EncoderCudaGraphManager
    """Encodes each item to a tensor of its own, (output tokens, hidden)."""
    example: Any
    """The tower's output of a small call, on the meta device."""
    make: Maker
    """Makes the output of a call from its encoded items."""
    uses: int = 0
    last: int = 0
    """The number of its last call."""
    took_place: bool = False
    """Whether captures of another key were released for these."""

    def capture(self) -> None:
        """Captures, unless this or another thread has done it."""
        if not self.manager.is_captured():
            self.manager.capture()


class CapturedTower:
    """A tower's captures, valid for its modules and its parameters' device and dtype."""

    def __init__(self, tower: nn.Module, reads: Reads, config: EncoderConfig, seen: Any = None) -> None:
        self.seen = seen
        """`calls_of` the tower as it is now; None: it has changed."""
        self.config = config
        self.reads = reads
        self._tower = tower
        self._parameters, self._first = first_parameter(tower)
        self._placement = self._place() or (torch.device("cpu"), torch.float32)
        # Its own hooks and forward run around a replay too.
        self.structure = Structure(tower, is_around=True)
        self._served: dict[Hashable, Served] = {}
        self._past: list[ManagerStats] = []
        self._lock = threading.RLock()
        self._calls, self._next, self._wait = 0, 0, 1
        self._seen: Recent[Hashable, deque[int]] = Recent(_MOST_SEEN)
        """The numbers of the last calls of keys without captures."""
        self._matters: Recent[str, bool] = Recent(_MOST_SEEN)
        """Whether the tower reads an argument."""
        tower_config = getattr(tower, "config", None)
        self._configured = {name: getattr(tower_config, name, False) for name in PENDING}
        self._configured["return_dict"] = getattr(tower_config, "return_dict", True)
        attention = attention_implementation(tower_config)
        self.calls: Any = None
        self.refusal: tuple[MissReason, str] | None = None
        """Why nothing is captured, as a reason and as text."""
        devices = {parameter.device for parameter in tower.parameters()}
        if attention not in _EXACT_ATTENTION and "flash" not in str(attention):
            self.refusal = (MissReason.FOREIGN_CODE, f"{attention} attention")
        elif len(devices) != 1 or next(iter(devices)).type == "meta":
            # Parameters that accelerate offloads are on meta between two calls.
            self.refusal = (MissReason.OFFLOADED, "its parameters are not all on one device")
        elif (foreign := foreign_code(tower, self.structure)) is not None:
            self.refusal = (MissReason.FOREIGN_CODE, foreign)
        else:
            try:
                kind, looked = self.seen = seen or calls_of(tower)
                self.calls = kind(twin_of(tower), reads, config, looked)
            except UnsupportedTowerError as error:
                self.refuse(error)

    def refuse(self, error: UnsupportedTowerError) -> None:
        """Has the tower itself serve all calls."""
        self.refusal = (MissReason.UNSUPPORTED_GRAPH, f"{type(self._tower).__name__}: {error}")

    def _place(self) -> tuple[torch.device, torch.dtype] | None:
        parameter = self._parameters.get(self._first)
        return None if parameter is None else (parameter.device, parameter.dtype)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._placement[0]

    @property
    def has_captures(self) -> bool:
        """Whether anything was captured."""
        return bool(self._served)

    def is_current(self) -> bool:
        """Whether nothing of the tower but parameters has changed: replays compare those."""
        return self._place() == self._placement and self.structure.is_current()

    def may_return(self) -> bool:
        """Whether there are captures, and the tower may be again what it was."""
        is_there = self.has_captures and self._place() == self._placement
        return is_there and self.structure.may_return()

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that all captures take."""
        stats = [served.manager.stats() for served in self._served.values()]
        return sum(each.graph_bytes + each.input_bytes for each in stats)

    @property
    def derived_bytes(self) -> int:
        """Bytes of parameters that are kept in another form."""
        return sum(served.manager.stats().derived_bytes for served in self._served.values())

    def in_training(self) -> str | None:
        """The first module of the tower in training mode, where that matters."""
        return "the tower" if self._tower.training else self.structure.in_training()

    def asked(self, given: Mapping[str, Any]) -> tuple[set[str], Any, bool]:
        """What a call, or else the configuration, asks for: more fields, which hidden states, and a tuple."""
        settled = {**self._configured, **{name: value for name, value in given.items() if value is not None}}
        fields = {name for option, name in PENDING.items() if settled[option]}
        return fields, settled["output_hidden_states"], settled["return_dict"] is False

    # --- serving

    def serves(self, call: Call, *, at_once: bool = False) -> bool:
        """Whether a call is served. Sizes other than the tower's own have to recur; with `_MOST_KEYS`
        captured, more recently than the least recently used one.
        """
        self._calls += 1
        served = self._served.get(call.key)
        if served is not None:
            served.uses += 1
            served.last = self._calls
            return True
        if at_once:
            return True
        with self._lock:
            recent = self._seen.get(call.key) or deque(maxlen=max(1, self.config.exact_min_hits))
            recent.append(self._calls)
            self._seen[call.key] = recent
            least = min((each.last for each in self._served.values()), default=0)
            is_full = len(self._served) >= _MOST_KEYS
            recurs = len(recent) == recent.maxlen and (not is_full or recent[0] > least)
            return (recurs or call.key in self.calls.expected_keys) and not (
                is_full and self._calls < self._next
            )

    def of(self, key: Hashable) -> Served:
        """The captures of a key, made at its first use; `capture` comes before the first batch."""
        served = self._served.get(key)
        if served is None:
            with self._lock:
                served = self._served.get(key)
                if served is None:
                    is_full = len(self._served) >= _MOST_KEYS
                    if is_full:
                        self._give_way()
                    served = self._make(key)
                    served.last, served.took_place = self._calls, is_full
                    self._served[key] = served
        return served

    def _give_way(self) -> None:
        """Releases the captures of the least recently used key."""
        key = min(self._served, key=lambda key: self._served[key].last)
        served = self._served.pop(key)
        served.manager.clear()
        # Only counts are kept: captures of all sizes that ever came would be without bound.
        counts = replace(served.manager.stats(), budgets={})
        self._past = [ManagerStats.total([*self._past, counts])]
        was_in_vain = served.took_place and served.uses < _PAYS
        self._wait = 2 * self._wait if was_in_vain else max(1, self._wait // 2)
        self._next = self._calls + self._wait

    def reads_argument(self, name: str) -> bool:
        """Whether small calls show that the tower's forward reads an argument."""
        matters: bool | None = self._matters.get(name)
        if matters is None:
            with self._lock:
                call, twin = self._example(self.calls.example_key)
                self._matters[name] = matters = reads_argument(lambda given: twin(**call, **given), name)
        return matters

    def _example(self, key: Hashable) -> tuple[dict[str, Any], nn.Module]:
        """The arguments of a small call, and a new copy of the tower, since this may install hooks."""
        call = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), self.calls.example(key))
        return call, twin_of(self._tower)

    def _make(self, key: Hashable) -> Served:
        call, twin = self._example(key)
        with torch.inference_mode(False), torch.no_grad():
            states = {"output_hidden_states": True} if self.calls.with_states else {}
            try:
                output = twin(**{**call, **states})
            except MODEL_ERRORS as error:
                raise InputError(f"a small call, of {key}, raises {error!r}") from error
        meta = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), dict(output))
        example = make_output(type(output), meta)
        manager = EncoderCudaGraphManager(self.calls.adapter(key, example), self.config)
        return Served(manager, example, self.calls.maker(example))

    def stats(self) -> list[ManagerStats]:
        """The statistics of each manager; captures of several have their keys."""
        with self._lock:
            many = len(self._served) > 1
            parts = {key: served.manager.stats() for key, served in self._served.items()}
            return [*self._past, *(part.under(str(key)) if many else part for key, part in parts.items())]

    def outdate_weights(self) -> None:
        """`fxsplit_encoder.refresh` of every manager."""
        for served in [*self._served.values()]:
            served.manager.check_weights()

    def clear(self) -> None:
        """Releases all captures."""
        with self._lock:
            for served in self._served.values():
                served.manager.clear()


# --- code that a capture would leave out


def foreign_code(tower: nn.Module, structure: Structure) -> str | None:
    """Code of a tower that a capture of its modules' own forwards would leave out, or None."""
    for name, what in structure.additions:
        return f"{'a hook' if what == 'hook' else 'another forward'} of {name}"
    for name, module in tower.named_modules():
        if is_parametrized(module):
            return f"the parametrization of {name}"
    layer = unmerging_layer(tower)
    return None if layer is None else f"the adapters of {layer}, which are merged and disabled"


# --- whether an argument matters


class _ArgumentReadError(Exception):
    """An argument was read."""


class _Argument:
    """An argument any use of which raises `_ArgumentReadError`."""

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise _ArgumentReadError

    __getattribute__ = __call__ = __enter__ = _raise


_KEPT = {*vars(_Argument), *("__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__")}
for _name in {*dir(torch.Tensor), *dir(tuple)} - _KEPT | {"__hash__"}:
    if _name.startswith("__") and callable(getattr(torch.Tensor, _name, _name)):
        setattr(_Argument, _name, _Argument.__call__)


def reads_argument(call: Callable[[dict[str, Any]], Any], name: str) -> bool:
    """Whether a forward, `call` with further arguments, reads or refuses one, or its result changes."""
    with torch.inference_mode(False), torch.no_grad():
        plain = tree_leaves(call({}).to_tuple())
        try:
            probed = tree_leaves(call({name: _Argument()}).to_tuple())
        except (_ArgumentReadError, TypeError, ValueError, RuntimeError):
            return True
    return len(plain) != len(probed) or not all(map(torch.equal, plain, probed))
