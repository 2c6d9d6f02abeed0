"""Calls of a tower: from its forward's arguments to an adapter's inputs, and from encoded items to its
output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.planning import MissReason

Reads = frozenset[int | str]

_PENDING = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}
"""Options that ask for more fields and change no other, and these fields."""


@dataclass(frozen=True)
class Call:
    """One call of a tower's forward, read."""

    inputs: dict[str, Any]
    """Pixels and what describes them."""
    items: int = 1
    """How many images or videos it counts as."""
    key: Hashable = ()
    """What tells the adapter that serves it from others of the same tower."""


@dataclass(frozen=True)
class Made:
    """What encoded items make of a tower's output."""

    fields: dict[str, Any]
    layers: dict[int, Tensor] = field(default_factory=dict)
    """Hidden states, by the number of their layer, 0 for what goes into the first."""


class Calls(ABC):
    """How towers of one kind are called.

    Args:
        twin: a linked copy of the tower, whose modules an adapter may change.
        reads: what the model reads: numbers of hidden states, names of fields; empty: the tower's output.
    """

    input_names: Sequence[str]
    """What the forward calls its inputs, in order; all else are options."""

    makes_layers: ClassVar[bool] = False
    """Whether hidden states can be captured."""

    def __init__(self, twin: nn.Module, reads: Reads, config: EncoderConfig) -> None:
        self.twin: Any = twin
        self.config = config
        self.layers: tuple[int, ...] = ()
        if self.makes_layers:
            layers = (layer for layer in reads if isinstance(layer, int))
            self.layers = tuple(sorted({layer % self.num_states for layer in layers}))
        self.fields = frozenset(name for name in reads if isinstance(name, str))

    @property
    def num_states(self) -> int:
        """The hidden states of the tower: what goes into the first layer, and what each returns."""
        return int(self.twin.config.num_hidden_layers) + 1

    @staticmethod
    def num_items(given: Mapping[str, Any]) -> int:
        """How many images or videos a call has, for statistics of those that the tower itself serves."""
        return 1

    @property
    @abstractmethod
    def expected_keys(self) -> Sequence[Hashable]:
        """The keys that the tower's configuration is for, captured at the first call and by a warm-up; others
        if they recur.
        """

    @abstractmethod
    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """A call's inputs, or why the tower itself has to serve it; InputError for what an adapter does not
        take. `given` are the inputs by name, `options` other arguments that change the result.
        """

    @abstractmethod
    def example(self, key: Hashable) -> dict[str, Any]:
        """Arguments of a small call of the tower itself, whose output shows the fields of all."""

    def makes(self, what: str | int, example: Any) -> bool:
        """Whether a field, or the hidden state of a layer, can be captured where it is read."""
        return isinstance(what, int) and self.makes_layers

    @abstractmethod
    def adapter(self, key: Hashable, example: Any) -> Any:
        """The adapter for calls of this key; `example` is the tower's output of the example, on the meta
        device.
        """

    @abstractmethod
    def inputs(self, call: Call, adapter: Any) -> dict[str, Any]:
        """The adapter's `mm_kwargs`."""

    @abstractmethod
    def arguments(self, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The same as arguments of the adapter's forward."""

    @abstractmethod
    def make(self, call: Call, items: Sequence[Tensor], example: Any) -> Made:
        """What the encoded items make of the output."""


def asked_for(
    given: Mapping[str, Any], changing: Mapping[str, Any], tower_config: Any
) -> tuple[set[str], dict[str, Any]]:
    """The further fields of the output that a call asks for, and the options of `changing` that change more.
    Where `given`, all arguments, says nothing, the configuration does.
    """
    fields = set()
    for option, name in _PENDING.items():
        asked = given.get(option)
        if getattr(tower_config, option, False) if asked is None else asked:
            fields.add(name)
    return fields, {name: value for name, value in changing.items() if name not in _PENDING}


def is_pixels(value: Any, dims: int | None = None) -> bool:
    """Whether an input has pixels to encode: a tensor with data."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type != "meta"
        and value.numel() > 0
        and dims in (None, value.dim())
    )
