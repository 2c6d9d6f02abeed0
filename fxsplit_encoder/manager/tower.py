"""Reads a tower: its modules, its configuration, the items of its requests, and the rows of its inputs.

A tower may be a whole model with its language model. vLLM's models name the modules of their towers in two
places, neither of which is complete: of two kinds of towers `_tower_model_names` has the names of the second,
and what joins a tower to the language model is a "connector" of `get_mm_mapping()`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.device import indexed
from fxsplit_encoder._torch.dispatch import check
from fxsplit_encoder._torch.peft import modules_out_of_use
from fxsplit_encoder._torch.tensors import tensors_of
from fxsplit_encoder.capture.buffers import StaticValue
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

# Requests of other items whose sizes are kept. A choice: a service sees few sizes.
_KEPT_ITEMS = 1024

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
    return [_checked(tower, index, spec) for index, spec in enumerate(given)]


def _checked(tower: Any, index: int, spec: Any) -> Any:
    """Returns a spec with integers for sizes, which a tower may have computed from its inputs."""
    paths = spec.path_output_tokens or {}
    sizes = [spec.input_size, spec.output_tokens, *paths.values()]
    integers: list[int] = []
    for size in sizes:
        try:
            integer = -1 if type(size).__name__ == "bool" else operator.index(size)
        except TypeError:  # of several elements, or no integer
            integer = -1
        if not 0 <= integer <= _MOST_TOKENS:
            raise InputError(
                f"mm_kwargs: {type(tower).__name__} reads item {index} as one of {shown(size)} rows; "
                f"expected an integer from 0 to {_MOST_TOKENS}; got {shown(spec)}"
            )
        integers.append(integer)
    if all(type(size) is int for size in sizes):
        return spec
    return EncoderItemSpec(integers[0], integers[1], dict(zip(paths, integers[2:], strict=True)))


class RequestItems(NamedTuple):
    """The items of one request, and all that their plan depends on."""

    specs: list[EncoderItemSpec]
    frames: list[int]
    """Of videos; 0 for an image."""
    segments: list[int]
    """That attend apart."""
    axis_keys: list[tuple[Hashable, ...]]
    modalities: list[str]
    key: Hashable
    """Equal where all of these are."""


class ItemReader:
    """Reads items of a tower's requests, and keeps those that it describes by a key
    (`PackedTower.described_items`). Threads may share it.
    """

    def __init__(self, tower: Any, num_axes: int = 0) -> None:
        self._tower = tower
        self._num_axes = num_axes
        methods = ("item_modalities", "item_segments", "item_frames")
        self._optional = {name: getattr(tower, name) for name in methods if hasattr(tower, name)}
        # The axis keys of items are known only from their selection.
        self._described_items: Callable[[dict[str, Any]], Hashable | None] | None = (
            None if num_axes else getattr(tower, "described_items", None)
        )
        self._known: dict[Hashable, RequestItems] = {}

    def read(self, mm_kwargs: Any) -> RequestItems:
        """Returns the items of a request; raises as `read_item_specs`."""
        described = self._describe(mm_kwargs)
        items = None if described is None else self._known.get(described)
        if items is None:
            items = self._read(mm_kwargs)
            if described is not None:
                if len(self._known) >= _KEPT_ITEMS:
                    self._known = {}
                self._known[described] = items
        return items

    def _describe(self, mm_kwargs: Any) -> Hashable | None:
        if self._described_items is None or type(mm_kwargs) is not dict or not mm_kwargs:
            return None
        try:
            return self._described_items(mm_kwargs)
        except FxSplitError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return None  # `read_item_specs` raises what is wrong with them

    def _read(self, mm_kwargs: Any) -> RequestItems:
        specs = read_item_specs(self._tower, mm_kwargs)
        count, axes = len(specs), self._num_axes
        if "item_modalities" in self._optional:
            modalities = self._told("item_modalities", mm_kwargs, count)
        else:
            modalities = [self._tower.get_input_modality(mm_kwargs)] * count if count else []
        if "item_segments" in self._optional:
            segments = self._told("item_segments", mm_kwargs, count)
        else:
            grids = mm_kwargs.get("video_grid_thw")
            is_of_videos = grids is not None and len(grids) == count
            segments = [int(grid[0]) for grid in grids] if is_of_videos else [1] * count
        frames = [0] * count
        if "video" in modalities:
            has_frames = "item_frames" in self._optional
            told = self._told("item_frames", mm_kwargs, count) if has_frames else segments
            counted = zip(told, modalities, strict=True)
            frames = [number if modality == "video" else 0 for number, modality in counted]
        keys: list[tuple[Hashable, ...]] = [()] * count
        if axes:
            keys = [select_items(self._tower, mm_kwargs, [i], axes)[1] for i in range(count)]
        sizes = tuple([(s.input_size, s.output_tokens, *s.path_output_tokens.items()) for s in specs])
        key = (sizes, tuple(frames), tuple(segments), tuple(keys), tuple(modalities))
        return RequestItems(specs, frames, segments, keys, modalities, key)

    def _told(self, method: str, mm_kwargs: Any, count: int) -> list[Any]:
        told: list[Any] = self._optional[method](mm_kwargs)
        if len(told) != count:
            raise InputError(
                f"{type(self._tower).__name__}.{method}: expected one entry an item, {count}; got {len(told)}"
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


# --- inputs

_Value = TypeVar("_Value", bound="StaticValue | None")


class RowGroups:
    """The inputs with one row for several patches, such as a row a token.

    Traced as they are, the graph would have two counts of tokens. So such an input enters the graph with its
    rows repeated for each patch, and the forward takes one of them. `factors` are patches per row, by the
    names of these inputs; `patches` are the inputs with a row a patch.
    """

    def __init__(self, factors: Mapping[str, int] | None = None, patches: Sequence[str] = ()) -> None:
        self.factors = dict(factors or {})
        self.patches = tuple(patches)

    @classmethod
    def of(cls, samples: Sequence[Mapping[str, Tensor]], without: Collection[str] = ()) -> RowGroups:
        """Finds the factors that hold in all samples of a forward's inputs, of different sizes, but for the
        inputs `without`.
        """
        rows = {
            name: [sample[name].shape[0] for sample in samples]
            for name, tensor in samples[0].items()
            if tensor.dim() > 0 and name not in without
        }
        growing = {name: counts for name, counts in rows.items() if len(set(counts)) > 1}
        if not growing:
            return cls()
        most = max(growing.values(), key=lambda counts: counts[0])
        factors = {
            name: most[0] // counts[0]
            for name, counts in growing.items()
            if 0 < counts[0] < most[0] and most == [most[0] // counts[0] * count for count in counts]
        }
        return cls(factors, [name for name, counts in growing.items() if counts == most])

    def spread(self, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """Repeats rows for each patch; InputError: an input has another number of rows for these patches."""
        if not self.factors:
            return dict(values)
        self._check(values)
        return {name: self._spread(name, value) for name, value in values.items()}

    def gather(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undoes `spread`."""
        if not self.factors:
            return dict(inputs)
        gathered = dict(inputs)
        rows = inputs[self.patches[0]].shape[0]
        for name in (*self.factors, *self.patches):
            check(inputs[name].shape[0] == rows)
        for name, factor in self.factors.items():
            gathered[name] = inputs[name].unflatten(0, (-1, factor))[:, 0]
        return gathered

    def _check(self, values: Mapping[str, StaticValue | None]) -> None:
        # What the samples had in proportion may be so by chance.
        given = [value for name in self.patches if (value := values.get(name)) is not None]
        for name, factor in self.factors.items():
            value = values.get(name)
            if value is not None and given and factor * _num_rows(value) != _num_rows(given[0]):
                raise InputError(
                    f"{name}: expected a row for every {factor} of {_num_rows(given[0])} patches, as in the "
                    f"inputs that the tower makes for captures; got {_num_rows(value)}"
                )

    def _spread(self, name: str, value: Any) -> Any:
        factor = self.factors.get(name)
        if factor is None or value is None:
            return value
        if isinstance(value, Tensor):
            return value.repeat_interleave(factor, dim=0)
        return [part.repeat_interleave(factor, dim=0) for part in value]


def _num_rows(value: StaticValue) -> int:
    return value.shape[0] if isinstance(value, Tensor) else sum(part.shape[0] for part in value)
