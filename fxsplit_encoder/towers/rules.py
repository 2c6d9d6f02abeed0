"""The grid rule: encodes packed patches by a tower of transformers whose class has no name here. A forward
that takes its host metadata by name, as `transformers.vision_utils` offers it, gets that of every frame or
item, computed on the host by the functions that the forward itself calls.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fxsplit_encoder._torch.dispatch import OnMeta
from fxsplit_encoder._torch.tensors import linked_copy
from fxsplit_encoder._torch.transformers import VisionCall, vision_calls, vision_values
from fxsplit_encoder.errors import UnsupportedTowerError
from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.grid import Grid
from fxsplit_encoder.towers.packed import PackedTower

MODEL_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""What a module's forward raises for inputs that it does not take."""

Field = tuple[str, int | None]
"""A field of an output that is a tensor, or an entry of one that holds tensors."""

_SEGMENTS = "cu_seqlens"
_MOST_SHAPES = 4
"""Shapes of patches that are tried."""

_LAST = "last_hidden_state"
_ASKED_FOR = ("hidden_states", "attentions")


@dataclass(frozen=True)
class GridLook:
    """Inputs and outputs of a tower, as a trial call shows them."""

    input_names: tuple[str, str]
    """Of patches, and of grids."""
    patches: tuple[int, ...]
    """Sizes of a view of the patches, one of them -1."""
    merge_size: int
    calls: tuple[VisionCall, ...]
    """The functions of the metadata of every patch."""
    columns: Mapping[str, tuple[int, torch.dtype]]
    """The `metadata_columns`."""
    bounds: tuple[str, ...]
    """Arguments for the length of the longest segment."""
    by_frame: bool
    """Whether the metadata of a video is that of its frames, which are the segments; else items are."""
    fields: tuple[tuple[Field, int], ...]
    """Of `packed_fields`, and the columns that each has in an embedding."""


def arguments_of(module: nn.Module) -> dict[str, Any]:
    """The named arguments of a module's forward, and their defaults."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [*inspect.signature(type(module).forward).parameters.values()][1:]
    return {each.name: each.default for each in parameters if each.kind not in kinds}


def is_model(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, which is not imported for it."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def grid_argument(module: nn.Module) -> str | None:
    """The argument for grids of a model of transformers; None: it takes none, or also tokens."""
    names = [*arguments_of(module)] if is_model(module) else []
    found = next((name for name in names[1:] if name.endswith("grid_thw")), None)
    return None if "input_ids" in names else found


def look_at_grids(tower: nn.Module) -> GridLook:
    """Calls a tower for a small image, on the device of its parameters; UnsupportedTowerError says why it
    cannot be served.
    """
    grid_name = grid_argument(tower)
    assert grid_name is not None
    name, *others = defaults = arguments_of(tower)
    others = [n for n in others if n != grid_name and defaults[n] is inspect.Parameter.empty]
    if others:
        raise UnsupportedTowerError(f"its forward also takes {', '.join(others)}")
    merge: Any = getattr(tower.config, "spatial_merge_size", 1)
    if not isinstance(merge, int):
        raise UnsupportedTowerError(f"its merge size is {merge}, not one number")
    grid = (1, merge, 3 * merge)  # on a CPU a forward takes the time of reading the weights
    twin = linked_copy(tower)
    patches, output, calls, bounds = _call(twin, name, grid_name, grid)
    columns, by_frame = _kinds(calls, merge)
    fields = packed_fields(output, math.prod(grid), merge**2)
    if not fields:
        shapes = {name: tuple(value.shape) for name, value in output.items() if hasattr(value, "shape")}
        raise UnsupportedTowerError(f"it returns {shapes} for {math.prod(grid)} patches, not a row a token")
    dtypes = {value.dtype for _, value in fields}
    if len(dtypes) > 1:
        raise UnsupportedTowerError(f"its fields are of {', '.join(map(str, dtypes))}, not of one dtype")
    widths = tuple((key, value.numel() * merge**2 // math.prod(grid)) for key, value in fields)
    look = GridLook((name, grid_name), patches, merge, calls, columns, bounds, by_frame, widths)
    adapter = GridTower(twin, look)
    values = adapter.host_metadata([grid])
    try:
        with torch.inference_mode(False), torch.no_grad(), OnMeta():
            moved = {name: value.to(adapter.device) for name, value in values.items()}
            pixels = zeros_for(tower, math.prod(grid), adapter.patch_features)
            adapter.core(pixels, moved.pop(_SEGMENTS), moved)
    except MODEL_ERRORS as error:
        raise UnsupportedTowerError(
            f"its forward also reads {grid_name}, beside {', '.join([*values, *bounds])}: "
            f"{type(error).__name__}: {error}".splitlines()[0]
        ) from error
    return look


def zeros_for(tower: nn.Module, *shape: int) -> Tensor:
    """An input of zeros in the dtype of the parameters, on their device."""
    parameter = next(tower.parameters())
    return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)


def _call(
    twin: nn.Module, name: str, grid_name: str, grid: Grid
) -> tuple[tuple[int, ...], Any, tuple[VisionCall, ...], tuple[str, ...]]:
    """The view of patches that a tower takes, its output, and what it calls for metadata."""
    weighted = (nn.Linear, nn.Conv2d, nn.Conv3d)
    layers = sorted((m for m in twin.modules() if isinstance(m, weighted)), key=lambda m: m.weight.dim())
    # A convolution makes patches if there is one.
    shapes = list(dict.fromkeys(tuple(layer.weight.shape[1:]) for layer in reversed(layers)))[:_MOST_SHAPES]
    views = dict.fromkeys(
        view for shape in shapes for view in ((-1, math.prod(shape)), (-1, *shape), (1, -1, *shape))
    )
    grids = torch.tensor([grid], device="cpu")
    errors = ["it has no layer that takes patches"]
    for view in views:
        pixels = zeros_for(twin, math.prod(grid), -math.prod(view)).view(view)
        try:
            with torch.inference_mode(False), torch.no_grad(), OnMeta():
                given = {name: pixels, grid_name: grids if pixels.is_meta else grids.to(pixels.device)}
                output, calls, bounds = vision_calls(functools.partial(twin, **given), grids)
        except MODEL_ERRORS as error:
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        if not hasattr(output, "to_tuple"):
            raise UnsupportedTowerError(f"it returns a {type(output).__name__}, not an output with fields")
        return view, output, calls, bounds
    raise UnsupportedTowerError(f"a call with patches of {shapes[:1]} raises {errors[-1]}")


def field_of(output: Any, field: Field) -> Tensor:
    """A tensor of an output."""
    value: Any = output[field[0]]
    tensor: Tensor = value if field[1] is None else value[field[1]]
    return tensor


def packed_fields(output: Any, patches: int, per_token: int) -> list[tuple[Field, Tensor]]:
    """The tensors of an output with a row for each patch or token, by field and place in it: those of an
    output token follow one another in the columns of an embedding. The last hidden state is one of them if
    it is the only one, hidden states of other layers are not.
    """
    found: list[tuple[Field, Tensor]] = []
    for name, value in output.items():
        entries = dict(enumerate(value)) if isinstance(value, list | tuple) else {None: value}
        if name not in _ASKED_FOR:
            found += [((name, n), each) for n, each in entries.items() if isinstance(each, Tensor)]
    fitting = [(key, value) for key, value in found if _rows(value) in (patches, patches // per_token)]
    return [each for each in fitting if each[0][0] != _LAST] or fitting


def _rows(value: Tensor) -> int:
    return value.shape[1] if value.dim() > 2 and value.shape[0] == 1 else value.shape[0]


# --- kinds of metadata


def _kinds(calls: Sequence[VisionCall], merge: int) -> tuple[dict[str, tuple[int, torch.dtype]], bool]:
    """The `metadata_columns` that calls make, and whether a video's metadata is that of its frames."""
    first, second = (1, 6 * merge, 10 * merge), (1, 4 * merge, 12 * merge)
    video = (2, *first[1:])
    columns: dict[str, tuple[int, torch.dtype]] = {}
    is_made_of_frames, has_frames = True, None
    for call in calls:
        ones, others, both, videos = (
            vision_values(call, grids) for grids in ([first], [second], [first, second], [video])
        )
        for name, one in ones.items():
            if name == _SEGMENTS:
                has_frames = _has_frames(videos[name], video)
                continue
            joined = torch.cat([one, others[name]])
            if _rows(one) != math.prod(first) or not joined.equal(both[name]):
                raise UnsupportedTowerError(
                    f"its {name} of {tuple(both[name].shape)} for images of {math.prod(first)} and "
                    f"{math.prod(second)} patches is not a row of its own for each patch"
                )
            columns[name] = (one.shape[1] if one.dim() > 1 else 0, one.dtype)
            is_made_of_frames &= torch.cat([one, one]).equal(videos[name])
    if has_frames is None:
        raise UnsupportedTowerError("its forward makes no cu_seqlens by transformers.vision_utils")
    if has_frames and not is_made_of_frames:
        raise UnsupportedTowerError("its metadata of a video is not that of the frames, its segments")
    return columns, has_frames


def _has_frames(lengths: Tensor, video: Grid) -> bool:
    """Whether segments of a video are its frames; False: it is one."""
    t, h, w = video
    if lengths.tolist() == [0, t * h * w]:
        return False
    if lengths.tolist() != [h * w * frame for frame in range(t + 1)]:
        raise UnsupportedTowerError(f"its segments of a video of {video} are {lengths.tolist()}")
    return True


# An entry has some 100 bytes per patch.
@functools.lru_cache(maxsize=256)
def _values(call: VisionCall, grid: Grid) -> dict[str, NDArray[Any]]:
    """The metadata of one item or frame."""
    return {name: value.numpy() for name, value in vision_values(call, [grid]).items()}


class GridTower(PackedTower):
    """Wraps a tower by what `look_at_grids` has seen of it. An embedding has all of `packed_fields`."""

    def __init__(self, tower: nn.Module, look: GridLook | None = None) -> None:
        self.look = look = look or look_at_grids(tower)
        self.metadata_columns = look.columns
        self.input_names = look.input_names
        self.frames_are_independent = look.by_frame
        self.items_are_segments = not look.by_frame
        super().__init__(
            tower,
            merge_size=look.merge_size,
            patch_features=-math.prod(look.patches),
            out_hidden_size=sum(width for _, width in look.fields),
        )
        self.patch_view = look.patches

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Computes metadata by the tower's own functions, for each frame or item in order."""
        items = [(1, h, w) for t, h, w in grids for _ in range(t)] if self.look.by_frame else grids
        found: dict[str, Tensor] = {}
        for call in self.look.calls:
            parts = [_values(call, item) for item in items]
            for name in parts[0]:
                if name in self.metadata_columns:
                    # A copy, also of one array: the cache keeps its own.
                    found[name] = torch.from_numpy(np.concatenate([part[name] for part in parts]))
        return found

    def flattened(self, patches: Tensor) -> Tensor:
        """The same without the dimension of a batch of one."""
        return patches.flatten(0, 1) if self.look.patches[0] == 1 and patches.dim() > 2 else patches

    def own_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """As `PackedTower`, without that dimension."""
        patches, grid = super().own_inputs(args, kwargs)
        return self.flattened(patches), grid

    def core(self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor]) -> Any:
        """The tower's forward with the host's metadata in place of grids."""
        name, grid_name = self.look.input_names
        # The patch count bounds every segment, whatever the batch.
        bounds = dict.fromkeys(self.look.bounds, pixel_values.shape[0])
        given = {name: self.viewed(pixel_values), grid_name: None, _SEGMENTS: cu_seqlens}
        return self.tower(**given, **bounds, **metadata)

    def packed_output(self, output: Any) -> Tensor:
        """All fields of an output token along the hidden dimension."""
        parts = [field_of(output, field).reshape(-1, width) for field, width in self.look.fields]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def check_values(tower: nn.Module, adapter: GridTower) -> None:
    """Compares what serves two images and a video, each by itself, with the tower's own forward of all;
    UnsupportedTowerError if they differ.
    """
    merge = adapter.merge_size
    grids = [(1, 2 * merge, 3 * merge), (1, 4 * merge, merge), (2, 2 * merge, 2 * merge)]
    generator = torch.Generator().manual_seed(0)
    shape = grids_of.count_patches(grids), adapter.patch_features
    patches = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    patches = patches.to(adapter.device, adapter.dtype)
    name, grid_name = adapter.input_names
    with torch.inference_mode(False), torch.no_grad():
        given = {name: adapter.viewed(patches), grid_name: torch.tensor(grids, device=adapter.device)}
        own = adapter.packed_output(tower(**given))
        parts = torch.split(patches, [t * h * w for t, h, w in grids])
        requests = [{"pixel_values": p, "image_grid_thw": [g]} for p, g in zip(parts, grids, strict=True)]
        served = torch.cat([adapter.encoder_eager_forward(request) for request in requests])
    check_difference(own, served, "each item encoded by itself, its metadata by name")


TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Differences of equal results relative to the largest value; in float32 and float64 1e-4."""


def check_difference(own: Tensor, served: Tensor, what: str) -> None:
    """Raises UnsupportedTowerError if a tower's output changes with what an adapter does."""
    difference = float((own - served).abs().max())
    if not difference <= TOLERANCES.get(own.dtype, 1e-4) * float(own.abs().max()):
        raise UnsupportedTowerError(f"its output changes by {difference:.1e} with {what}")
