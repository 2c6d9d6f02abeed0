"""What a tower was captured as: its adapters and runners, for as long as the tower stays what it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.dispatch import tree_map_only
from fxsplit_encoder._torch.structure import Structure
from fxsplit_encoder._torch.tensors import forward_hooks_of, linked_copy
from fxsplit_encoder._torch.transformers import remove_output_hooks
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.integrations.hugging_face.calls import Call, Calls
from fxsplit_encoder.integrations.hugging_face.families import calls_of
from fxsplit_encoder.integrations.hugging_face.runners import CompiledRunner, ManagerRunner, Runner
from fxsplit_encoder.integrations.hugging_face.structure import foreign_code, is_in_one_place
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.runtime.statistics import ManagerStats
from fxsplit_encoder.towers.base import first_parameter

_MOST_KEYS = 8
"""Sizes of images that are captured for one tower; calls of others go to the tower itself."""


@dataclass(frozen=True)
class Settings:
    """How towers are served."""

    config: EncoderConfig
    compiles: bool
    """Whether they go behind `torch.compile` instead of into a manager."""


@dataclass(frozen=True)
class _Served:
    """What serves the calls of one key."""

    adapter: Any
    runner: Runner
    example: Any
    """The tower's output of a small call, on the meta device."""


class CapturedTower:
    """A tower's captures. They hold for its modules, and for the device and dtype of its parameters.

    Args:
        layers: as of `Calls`.
    """

    def __init__(self, tower: nn.Module, layers: tuple[int, ...], settings: Settings) -> None:
        self.settings = settings
        self._tower = tower
        self._parameters, self._first = first_parameter(tower)
        self._placement = self._place() or (torch.device("cpu"), torch.float32)
        # Its own hooks and forward run around a replay too.
        self._structure = Structure(tower, is_around=True)
        self._served: dict[Hashable, _Served] = {}
        self._seen: Counter[Hashable] = Counter()
        self.calls: Calls | None = None
        self.refusal: tuple[MissReason, str] | None = None
        """Why nothing is captured, in one word and in a few."""
        if not is_in_one_place(tower):
            self.refusal = (MissReason.OFFLOADED, "its parameters are not all on one device")
        elif (foreign := foreign_code(tower, self._structure)) is not None:
            self.refusal = (MissReason.FOREIGN_CODE, foreign)
        else:
            self.calls = calls_of(tower)(_twin(tower), layers, settings.config)

    def _place(self) -> tuple[torch.device, torch.dtype] | None:
        parameter = self._parameters.get(self._first)
        return None if parameter is None else (parameter.device, parameter.dtype)

    @property
    def device(self) -> torch.device:
        """That of the parameters."""
        return self._placement[0]

    @property
    def has_captures(self) -> bool:
        """Whether anything was captured."""
        return bool(self._served)

    def is_current(self) -> bool:
        """Whether the tower is still what was captured. Parameters are compared where captures read them."""
        return self._place() == self._placement and self._structure.is_unchanged()

    # --- serving

    def serves(self, call: Call, *, at_once: bool = False) -> bool:
        """Whether a call is served, or its tower's own forward does it: images of other sizes than the
        tower's own have to recur, and of at most so many sizes.
        """
        assert self.calls is not None
        if call.key in self._served:
            return True
        self._seen[call.key] += 1
        recurs = self._seen[call.key] >= self.settings.config.exact_min_hits
        return len(self._served) < _MOST_KEYS and (at_once or recurs or call.key in self.calls.expected_keys)

    def run(self, call: Call) -> tuple[Any, list[Tensor]]:
        """An example of the output, and the encoded items."""
        assert self.calls is not None
        served = self.of(call.key)
        return served.example, served.runner.run(self.calls.inputs(call, served.adapter))

    def of(self, key: Hashable) -> _Served:
        """What serves calls of a key, made now if it is the first."""
        if key not in self._served:
            self._served[key] = self._make(key)
        return self._served[key]

    def _make(self, key: Hashable) -> _Served:
        assert self.calls is not None
        # Of another copy: what the calls have may be another tower than it was, and this may install hooks.
        call = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), self.calls.example(key))
        with torch.inference_mode(False), torch.no_grad():
            output = _twin(self._tower)(**call, return_dict=True)
        example = type(output)(**{n: _on_meta(value) for n, value in output.items()})
        adapter = self.calls.adapter(key, example)
        config = self.settings.config
        if self.settings.compiles:
            return _Served(adapter, CompiledRunner(adapter, config, self.calls.arguments), example)
        return _Served(adapter, ManagerRunner(adapter, config), example)

    def stats(self) -> list[ManagerStats]:
        """What each runner served; where there are several, captures are told apart by the key."""
        many = len(self._served) > 1
        parts = {key: served.runner.stats() for key, served in self._served.items()}
        return [part.under(str(key)) if many else part for key, part in parts.items()]

    def clear(self) -> None:
        """Gives all memory of captures back."""
        for served in self._served.values():
            served.runner.clear()


def _twin(tower: nn.Module) -> nn.Module:
    """A linked copy without hooks: those of the tower itself run around whatever stands in its place, and any
    others only collect outputs.
    """
    twin = linked_copy(tower)
    for hooks in forward_hooks_of(twin):
        hooks.clear()
    remove_output_hooks(twin)
    return twin


def _on_meta(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), value)
