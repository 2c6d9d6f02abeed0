"""Converts a tower's arguments to an adapter's inputs, and encoded items to fields of the tower's output."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.structure import OWN
from fxsplit_encoder._torch.tensors import forward_hooks_of, linked_copy
from fxsplit_encoder._torch.transformers import remove_output_hooks
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.planning.plan import MissReason

Reads = frozenset[int | str]

_PENDING = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}
"""Options that ask for more fields of the output and change no other, and these fields."""


@dataclass(frozen=True)
class Call:
    """The inputs of one call of a tower's forward."""

    inputs: dict[str, Any]
    key: Any = ()
    """Calls of one tower with equal keys share an adapter."""


@dataclass(frozen=True)
class Made:
    """Fields of a tower's output, and hidden states by their layer; 0 is the input of the first."""

    fields: dict[str, Any]
    layers: dict[int, Tensor] = field(default_factory=dict)


class Calls(ABC):
    """The calls of one kind of towers.

    Args:
        twin: a linked copy of the tower, whose modules an adapter may change.
        reads: numbers of hidden states and names of fields that the model reads; empty: the whole output.
        seen: for a tower that a rule serves, its second result of `calls_of`.
    """

    input_names: Sequence[str]
    """The forward's names of its inputs, in order; other arguments are options."""
    counted_name: ClassVar[str] = ""
    """The argument with a row for each image or video; empty: statistics count a call as one item."""
    makes_layers: bool = False
    """Whether hidden states can be captured."""
    with_states: frozenset[str] = frozenset({"hidden_states"})
    """Fields that an output has with `output_hidden_states` only."""

    def __init__(self, twin: nn.Module, reads: Reads, config: EncoderConfig, seen: Any = None) -> None:
        self.twin: Any = twin
        self.config = config
        self.layers: tuple[int, ...] = ()
        if self.makes_layers:
            layers = (layer for layer in reads if isinstance(layer, int))
            self.layers = tuple(sorted({layer % self.num_states for layer in layers}))
        self.fields = frozenset(name for name in reads if isinstance(name, str))

    @property
    def num_states(self) -> int:
        """Hidden states of the tower: the input of the first layer, and each layer's output."""
        return int(self.twin.config.num_hidden_layers) + 1

    @property
    def example_key(self) -> Hashable:
        """A key that the tower takes."""
        return ()

    @property
    def expected_keys(self) -> Sequence[Hashable]:
        """The keys of the configuration, captured at the first call or a warm-up; others if they recur."""
        return (self.example_key,)

    @abstractmethod
    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """A call's inputs, or why the tower itself serves it; InputError for what the adapter does not take.
        `given` are the inputs by name, `options` other arguments that change the result.
        """

    @abstractmethod
    def example(self, key: Any) -> dict[str, Any]:
        """Arguments of a small call of the tower itself, whose output has the fields of all."""

    def makes(self, what: str | int, example: Any) -> bool:
        """Whether a field, or the hidden state of a layer, can be captured."""
        return isinstance(what, int) and self.makes_layers

    @abstractmethod
    def adapter(self, key: Any, example: Any) -> Any:
        """The adapter for calls of this key; `example` is the tower's output of it, on the meta device."""

    def inputs(self, call: Call, adapter: Any) -> dict[str, Any]:
        """The adapter's `mm_kwargs`."""
        return call.inputs

    @abstractmethod
    def make(self, call: Call, items: Sequence[Tensor], example: Any) -> Made:
        """The fields and layers that the encoded items hold."""


def asked_for(
    given: Mapping[str, Any], changing: Mapping[str, Any], tower_config: Any
) -> tuple[set[str], dict[str, Any]]:
    """Fields of the output that arguments or the configuration add; `changing` without their options."""
    fields = set()
    for option, name in _PENDING.items():
        asked = given.get(option)
        if getattr(tower_config, option, False) if asked is None else asked:
            fields.add(name)
    return fields, {name: value for name, value in changing.items() if name not in _PENDING}


def is_pixels(value: Any, dims: int | None = None) -> TypeGuard[Tensor]:
    """Whether an input has pixels to encode: a tensor with data."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type != "meta"
        and value.numel() > 0
        and dims in (None, value.dim())
    )


def accepts(module: nn.Module, name: str) -> bool:
    """Whether a module's forward takes an argument, by its name or among any others."""
    parameters = inspect.signature(type(module).forward).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def twin_of(tower: nn.Module) -> nn.Module:
    """A linked copy in evaluation mode without hooks: the tower's own run around whatever takes its place."""
    twin = linked_copy(tower)
    for module in twin.modules():
        vars(module)["training"] = False
    vars(twin)[OWN] = True
    for hooks in forward_hooks_of(twin):
        hooks.clear()
    remove_output_hooks(twin)
    return twin
