"""Reads a tower: its modules, its configuration, and the items of its requests.

A tower may be a whole model with its language model. vLLM's models name the modules of their towers in two
places, neither of which is complete: of two kinds of towers `_tower_model_names` has the names of the second,
and what joins a tower to the language model is a "connector" of `get_mm_mapping()`.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.device import indexed
from fxsplit_encoder._torch.peft import modules_out_of_use
from fxsplit_encoder._torch.tensors import tensors_of
from fxsplit_encoder.errors import FxSplitError, InputError
from fxsplit_encoder.messages import names_of, shown
from fxsplit_encoder.planning.limits import Limits
from fxsplit_encoder.protocol import (
    ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG,
    EncoderCudaGraphConfig,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
)

# vLLM sets it on a model while it builds its towers.
_MARKED = "_tower_model_names"

# Tables of costs count in 64 bits, and sums of a request's items must fit.
_MOST_TOKENS = 2**48


# --- modules


def tower_part(tower: object) -> nn.Module | None:
    """Returns the modules that a model names as its towers, or all of it; None for no module."""
    if not isinstance(tower, nn.Module):
        return None
    names = sorted(_tower_names(tower))
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    modules = dict(tower.named_modules())
    found = [modules[name] for name in outermost if name in modules]
    return nn.ModuleList(found) if found else tower


def _tower_names(model: Any) -> set[str]:
    mapping = model.get_mm_mapping() if hasattr(model, "get_mm_mapping") else None
    listed = [getattr(model, _MARKED, ())]
    listed += [getattr(mapping, kind, ()) for kind in ("tower_model", "connector")]
    return {name.rstrip(".") for names in listed for name in names}


def tower_tensors(tower: object) -> list[Tensor]:
    """Returns the parameters and buffers of a model's towers, but for adapters that are not in use,
    and those that the model holds itself.
    """
    part = tower_part(tower)
    if part is None:
        return []
    assert isinstance(tower, nn.Module)
    own = [*tower.parameters(recurse=False), *tower.buffers(recurse=False)] if part is not tower else []
    unused = modules_out_of_use(part.modules())  # adapters that may be deleted
    held = (tensors_of(module) for module in part.modules() if module not in unused)
    tensors = (tensor for kinds in zip(*held, strict=True) for kind in kinds for tensor in kind.values())
    return [*{id(tensor): tensor for tensor in tensors if tensor is not None}.values(), *own]


def named_tensors(tower: object) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a model by all of their names; none for no module."""
    if not isinstance(tower, nn.Module):
        return {}
    parameters = tower.named_parameters(remove_duplicate=False)
    return dict((*parameters, *tower.named_buffers(remove_duplicate=False)))


def placement_of(
    tower: object, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    """Returns the device and dtype of a tower: as given, else those of its first parameter."""
    part = tower_part(tower)
    parameter = next(part.parameters(), None) if part is not None else None
    if device is None:
        device = parameter.device if parameter is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = parameter.dtype if parameter is not None else torch.get_default_dtype()
    return indexed(torch.device(device)), dtype


@dataclass(frozen=True)
class TowerSpec:
    """A tower with its configuration, limits and dtype."""

    tower: SupportsEncoderCudaGraph
    model_config: EncoderCudaGraphConfig
    limits: Limits
    dtype: torch.dtype


# --- items


def read_item_specs(tower: Any, mm_kwargs: Any) -> list[EncoderItemSpec]:
    """Reads the sizes of a batch's items; InputError: no mapping, an empty one, or impossible sizes."""
    is_mapping = type(mm_kwargs) is dict or isinstance(mm_kwargs, Mapping)  # of other types it takes longer
    if not is_mapping or not mm_kwargs:
        raise InputError(
            f"mm_kwargs: expected a mapping from names to the inputs of a batch; got {shown(mm_kwargs)}"
        )
    try:
        specs_given = tower.get_encoder_cudagraph_item_specs(mm_kwargs)
    except FxSplitError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"mm_kwargs: {type(tower).__name__} does not read {names_of(mm_kwargs)} as items: "
            f"{type(error).__name__}: {error}"
        ) from error
    given = list(specs_given)
    for spec in given:
        if spec.path_output_tokens:
            break
        rows, tokens = spec.input_size, spec.output_tokens
        if type(rows) is not int or type(tokens) is not int:
            break
        if not (0 <= rows <= _MOST_TOKENS and 0 <= tokens <= _MOST_TOKENS):
            break
    else:  # as nearly all are
        return given
    specs = [*map(_with_integers, given)]
    _check_sizes(tower, specs)
    return specs


def _check_sizes(tower: Any, specs: Sequence[Any]) -> None:
    for index, spec in enumerate(specs):
        for size in (spec.input_size, spec.output_tokens, *(spec.path_output_tokens or {}).values()):
            is_integer = isinstance(size, Integral) and type(size).__name__ != "bool"
            if not (is_integer and 0 <= int(size) <= _MOST_TOKENS):
                raise InputError(
                    f"mm_kwargs: {type(tower).__name__} reads item {index} as one of {shown(size)} rows; "
                    f"expected an integer from 0 to {_MOST_TOKENS}; got {shown(spec)}"
                )


def _with_integers(spec: Any) -> Any:
    """Returns a spec with integers for sizes that a tower computed from its inputs."""
    if not isinstance(spec.input_size, Tensor | np.generic):
        return spec
    integer: Any = operator.index
    try:
        paths = {name: integer(size) for name, size in spec.path_output_tokens.items()}
        return EncoderItemSpec(integer(spec.input_size), integer(spec.output_tokens), paths)
    except TypeError:  # of several elements, or no integer
        return spec


class ItemFacts:
    """Reads other facts of items that plans need, by optional methods of a tower."""

    def __init__(self, tower: SupportsEncoderCudaGraph) -> None:
        self._tower = tower
        self._modalities = getattr(tower, "item_modalities", None)
        self._segments = getattr(tower, "item_segments", None)
        self._frames = getattr(tower, "item_frames", None)

    def modalities(self, mm_kwargs: dict[str, Any], num_items: int) -> list[str]:
        """Returns "image" or "video" for every item, by default the batch's own."""
        if self._modalities is not None:
            return self._check(self._modalities(mm_kwargs), "item_modalities", num_items)
        return [self._tower.get_input_modality(mm_kwargs)] * num_items if num_items else []

    def segments(self, mm_kwargs: dict[str, Any], num_items: int) -> list[int]:
        """Returns every item's attention segments: from the tower, else its video's frames, else one."""
        if self._segments is not None:
            return self._check(self._segments(mm_kwargs), "item_segments", num_items)
        grids = mm_kwargs.get("video_grid_thw")
        if grids is None or len(grids) != num_items:
            return [1] * num_items
        return [int(grid[0]) for grid in grids]

    def frames(
        self, mm_kwargs: dict[str, Any], modalities: Sequence[str], segments: Sequence[int]
    ) -> list[int]:
        """Returns every item's video frames, 0 for an image; a segment counts as one by default."""
        if "video" not in modalities:
            return [0] * len(modalities)
        told = segments
        if self._frames is not None:
            told = self._check(self._frames(mm_kwargs), "item_frames", len(modalities))
        return [count if modality == "video" else 0 for count, modality in zip(told, modalities, strict=True)]

    def _check(self, told: list[Any], method: str, num_items: int) -> list[Any]:
        if len(told) != num_items:
            raise InputError(
                f"{type(self._tower).__name__}.{method}: expected one entry an item, {num_items}; got "
                f"{len(told)}"
            )
        return told


def select_items(
    tower: SupportsEncoderCudaGraph, mm_kwargs: dict[str, Any], indices: Sequence[int], num_axes: int
) -> tuple[dict[str, Any], tuple[Hashable, ...]]:
    """Returns the inputs of some items, and their axis keys; InputError: not one key an axis."""
    selected = tower.select_encoder_cudagraph_items(mm_kwargs, list(indices))
    keys = selected.get(ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG)
    if keys is not None:
        selected = {k: v for k, v in selected.items() if k != ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG}
    if not num_axes:
        return selected, ()
    if keys is None:
        raise InputError(
            f"select_encoder_cudagraph_items gave no {ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG!r}; a tower with "
            "capture_axes must give one key an axis there"
        )
    if not isinstance(keys, tuple | list) or len(keys) != num_axes:
        raise InputError(
            f"select_encoder_cudagraph_items gave {keys!r} as {ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG!r}; "
            f"expected a tuple of {num_axes}, one key for each of the tower's capture_axes"
        )
    return selected, tuple(keys)
