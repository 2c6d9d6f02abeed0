"""The calls of a tower: from its forward's arguments to an adapter's inputs, and from encoded items to its
output. The class of calls is looked up by the name of the tower's class.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeGuard

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
    """Images or videos."""
    key: Any = ()
    """Calls of one tower with equal keys share an adapter."""


@dataclass(frozen=True)
class Made:
    """The part of a tower's output that encoded items make."""

    fields: dict[str, Any]
    layers: dict[int, Tensor] = field(default_factory=dict)
    """Hidden states, by the number of their layer, 0 for what goes into the first."""


class Calls(ABC):
    """The calls of one kind of towers.

    Args:
        twin: a linked copy of the tower, whose modules an adapter may change.
        reads: what the model reads: numbers of hidden states, names of fields; empty: the tower's output.
    """

    input_names: Sequence[str]
    """The forward's names of its inputs, in order; all else are options."""

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
        """Hidden states of the tower: the input of the first layer, and each layer's output."""
        return int(self.twin.config.num_hidden_layers) + 1

    @staticmethod
    def num_items(given: Mapping[str, Any]) -> int:
        """Images or videos of a call, for statistics of those that the tower itself serves."""
        return 1

    @property
    @abstractmethod
    def expected_keys(self) -> Sequence[Hashable]:
        """The keys of the configuration, captured at the first call or a warm-up; others if they recur."""

    @abstractmethod
    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """A call's inputs, or why the tower itself has to serve it; InputError for what an adapter does not
        take. `given` are the inputs by name, `options` other arguments that change the result.
        """

    @abstractmethod
    def example(self, key: Any) -> dict[str, Any]:
        """Arguments of a small call of the tower itself, whose output shows the fields of all."""

    def makes(self, what: str | int, example: Any) -> bool:
        """Whether a field, or the hidden state of a layer, can be captured where it is read."""
        return isinstance(what, int) and self.makes_layers

    @abstractmethod
    def adapter(self, key: Any, example: Any) -> Any:
        """The adapter for calls of this key; `example` is the tower's output of it, on the meta device."""

    @abstractmethod
    def inputs(self, call: Call, adapter: Any) -> dict[str, Any]:
        """The adapter's `mm_kwargs`."""

    @abstractmethod
    def arguments(self, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The arguments of the adapter's forward from its `mm_kwargs`."""

    @abstractmethod
    def make(self, call: Call, items: Sequence[Tensor], example: Any) -> Made:
        """The fields and layers that the encoded items hold."""


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


def is_pixels(value: Any, dims: int | None = None) -> TypeGuard[Tensor]:
    """Whether an input has pixels to encode: a tensor with data."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type != "meta"
        and value.numel() > 0
        and dims in (None, value.dim())
    )


# --- classes of towers

# By name, so that neither a model family nor an adapter is imported before it is used.
_CALLS = {
    "CLIPVisionModel": ("dense_calls", "DenseCalls"),
    "CLIPVisionTransformer": ("dense_calls", "DenseCalls"),
    "DINOv3ViTModel": ("dense_calls", "DenseCalls"),
    "Dinov2Model": ("dense_calls", "DenseCalls"),
    "Dinov2WithRegistersModel": ("dense_calls", "DenseCalls"),
    "Glm4vMoeVisionModel": ("packed_calls", "GridCalls"),
    "Glm4vVisionModel": ("packed_calls", "GridCalls"),
    "Idefics3VisionTransformer": ("dense_calls", "Idefics3Calls"),
    "InternVLVisionModel": ("dense_calls", "DenseCalls"),
    "Kimi_K25VisionModel": ("packed_calls", "GridCalls"),
    "Llama4VisionModel": ("dense_calls", "Llama4Calls"),
    "PixtralVisionModel": ("packed_calls", "PixtralCalls"),
    "Qwen2VisionTransformerPretrainedModel": ("packed_calls", "GridCalls"),
    "Qwen2_5_VisionTransformerPretrainedModel": ("packed_calls", "GridCalls"),
    "Qwen3VLMoeVisionModel": ("packed_calls", "GridCalls"),
    "Qwen3VLVisionModel": ("packed_calls", "GridCalls"),
    "Qwen3_5MoeVisionModel": ("packed_calls", "GridCalls"),
    "Qwen3_5VisionModel": ("packed_calls", "GridCalls"),
    "Siglip2VisionModel": ("dense_calls", "Siglip2Calls"),
    "Siglip2VisionTransformer": ("dense_calls", "Siglip2Calls"),
    "SiglipVisionModel": ("dense_calls", "DenseCalls"),
    "SiglipVisionTransformer": ("dense_calls", "DenseCalls"),
    "SmolVLMVisionTransformer": ("dense_calls", "Idefics3Calls"),
    "Step3p7VisionModel": ("dense_calls", "Step3p7Calls"),
}


def served_towers() -> list[str]:
    """The class names of the towers that `accelerate` serves."""
    return sorted(_CALLS)


def calls_of(module: nn.Module) -> Any:
    """The class of `Calls` for a tower; None: it is no tower that is known."""
    name = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _CALLS), None)
    if name is None:
        return None
    file, kind = _CALLS[name]
    return getattr(importlib.import_module(f"fxsplit_encoder.hugging_face.{file}"), kind)
