"""The base class of all adapters, a module with the forward of its tower."""

from __future__ import annotations

import itertools
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.dynamo import allow_no_frame, not_traced
from fxsplit_encoder._torch.modes import foreign_around, without_autograd
from fxsplit_encoder._torch.structure import Structure
from fxsplit_encoder._torch.tensors import share_names, tensors_of
from fxsplit_encoder.caching import Recent
from fxsplit_encoder.compile.blocks import ChangedBlocksError
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import names_of
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.protocol import EncoderCudaGraphCaptureInputs, scatter_output_slices

_MOST_STATES = 16
"""States of a tower whose traces are told apart, twice as many as Dynamo keeps of a function by default."""

VIDEOS = "pixel_values_videos"
"""The key of videos in `mm_kwargs`; their grids, where they are patches, are in `video_grid_thw`."""


class WrappedTower(nn.Module):
    """A tower behind the manager's protocol, with the tower's own forward and names of parameters, buffers
    and submodules: it may take the tower's place in a model whose checkpoints are loaded and saved.

    Args:
        tower: the module that encodes.
        children: submodules by their names here; None: the tower's.
    """

    supports_encoder_cudagraph: ClassVar[Literal[True]] = True
    declares_padding: bool = False
    """Whether real rows are declared independent of padding, without a proof."""
    has_plain_blocks: bool = False
    """Whether all blocks take tensors, numbers and names and return one tensor: equal ones are traced once"""
    deepstack_levels: int = 0
    """Further outputs that follow the main one along the hidden dimension, each as wide as it."""
    assembles: ClassVar[bool] = False
    """Whether `assembled` makes an item's embedding from its rows of the output."""
    modalities: Sequence[str] = ("image",)
    max_frames_per_video: int = 1
    """Frames of the longest video that a budget holds."""
    out_hidden_size: int
    """Columns of the output."""
    input_names: Sequence[str]
    """The names of the inputs of the tower's own forward; its other arguments are options."""
    tower: Any
    registered: ClassVar[weakref.WeakValueDictionary[str, WrappedTower]] = weakref.WeakValueDictionary()
    """All of a process by their `registered_name`, for ops, which take no modules."""
    _numbers: ClassVar = itertools.count()

    def __init__(self, tower: nn.Module, children: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        object.__setattr__(self, "tower", tower)  # not a submodule: its parameters have names already
        if children is None:
            share_names(self, tower)
        else:
            for name, child in children.items():
                self.add_module(name, child)
        self._register()
        self.eager_calls = Counter[MissReason]()
        """Calls that the tower itself served, by reason."""
        self._first_parameters, self._first_name = first_parameter(tower)

    def _register(self) -> None:
        self.registered_name = f"{type(self).__name__}_{next(self._numbers)}"
        self.registered[self.registered_name] = self
        self._states: Recent[Structure, str] = Recent(_MOST_STATES)
        """By the state that blocks were traced in, the string that Dynamo guards of that trace."""
        self.blocks_as_traced = f"blocks_{next(self._numbers)}"

    def note_trace(self) -> None:
        """Notes that blocks are traced in the state that the tower is in."""
        state = Structure.of_now([*self._states]) or Structure(self.tower)
        self._states[state] = self.blocks_as_traced

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _follow_blocks(self) -> None:
        """Has Dynamo take its trace of the tower's state, or trace again: it guards the string."""
        state = Structure.of_now([*self._states])
        name = None if state is None else self._states[state]
        is_of_no_use = name in (None, self.blocks_as_traced)
        self.blocks_as_traced = f"blocks_{next(self._numbers)}" if is_of_no_use else str(name)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the tower that the surrounding model reads, such as `config`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "tower":
                raise
            return getattr(self.tower, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_states"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._register()  # a copy is another tower

    def train(self, mode: bool = True) -> WrappedTower:
        """Sets the mode of the tower too."""
        super().train(mode)
        self.tower.train(mode)
        return self

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward. Not compiled: options and inference mode would each be another trace."""
        call = _settle(self, args, kwargs)
        if call.eager is not None:
            return _call_uncompiled(self, args, kwargs, call.eager)
        if call.runs_as_it_is:
            output = self._call_compiled(call)
        else:
            with torch.inference_mode(False), torch.no_grad():
                output = self._call_compiled(call)
        return _as_tuple(output) if kwargs.get("return_dict") is False else output

    @not_traced
    def _call_compiled(self, call: _Call) -> Any:
        try:
            return super().__call__(*call.args, **call.kwargs)
        except ChangedBlocksError:
            self._follow_blocks()
        return super().__call__(*call.args, **call.kwargs)

    def traced_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The forward's arguments for a trace, made outside the compiled frame; InputError for bad ones."""
        return args, kwargs

    def matters(self, option: str, value: Any) -> bool:
        """Whether an option changes what the forward returns."""
        return matters(option, value)

    def call_tower(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the tower itself, with its own options and attention."""
        return with_own_attention(self.tower)(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The device of the tower's parameters."""
        # A walk to the first parameter takes ten microseconds.
        return self._first_parameters[self._first_name].device  # type: ignore[union-attr]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tower's parameters."""
        dtype: torch.dtype = next(self.tower.parameters()).dtype
        return dtype

    def trace_plain_blocks_once(self) -> None:
        """Has Dynamo trace one of the equal blocks for all, in a forward that uses results of blocks only."""
        if self.has_plain_blocks and not self.tower.training and torch.compiler.is_dynamo_compiling():
            trace_equal_blocks_once(self.registered_name, self.blocks_as_traced)

    # --- the manager's protocol

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        """ "video" if there are videos or their grids, else what the tower takes."""
        has_videos = any(mm_kwargs.get(name) is not None for name in (VIDEOS, "video_grid_thw"))
        return "video" if has_videos else self.modalities[0]

    def get_max_frames_per_video(self) -> int:
        """Frames of the longest video; 1: there are no videos."""
        return self.max_frames_per_video

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: tuple[Hashable, ...] | None = None,
    ) -> EncoderCudaGraphCaptureInputs:
        """Tensors that fill a budget, with contents that the forward can run on."""
        frames = max_batch_size + max_frames_per_batch
        return EncoderCudaGraphCaptureInputs(self.capture_values(path, token_budget, frames, device, dtype))

    @abstractmethod
    def capture_values(
        self, path: str, token_budget: int, frames: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The tensors of a capture on a path, for at most so many images and frames."""

    def postprocess_encoder_output(
        self,
        outputs: dict[str, Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: dict[int, Tensor] | list[Tensor | None],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Puts every item's rows of the output, or what `assembled` makes of them, into `dest`."""
        if not self.assembles:
            scatter_output_slices(outputs["default"], indices, per_item_out_tokens, dest, clone)
            return
        if batch_mm_kwargs is None:
            raise InputError("batch_mm_kwargs: expected the inputs of the batch; got None")
        for index, rows in zip(indices, self.assembled(outputs, batch_mm_kwargs, clone), strict=True):
            dest[index] = rows

    def items_of(
        self, outputs: dict[str, Tensor], tokens: list[int], mm_kwargs: dict[str, Any]
    ) -> list[Tensor]:
        """The embedding of every item of a batch, of so many rows each; where the adapter can, views."""
        items: dict[int, Tensor] = {}
        indices = list(range(len(tokens)))
        self.postprocess_encoder_output(outputs, indices, tokens, items, batch_mm_kwargs=mm_kwargs)
        return [items[index] for index in indices]

    def assembled(
        self, outputs: dict[str, Tensor], mm_kwargs: dict[str, Any], clone: bool
    ) -> Iterable[Tensor]:
        """The embeddings of a batch, item by item, with `clone` in memory of their own."""
        raise NotImplementedError

    def check_given(self, mm_kwargs: Mapping[str, Any], names: Sequence[str]) -> None:
        """Raises InputError for none of the inputs `names` but others, or videos that are none of these."""
        tower = type(self).__name__
        if VIDEOS not in names and mm_kwargs.get(VIDEOS) is not None:
            raise InputError(f"{VIDEOS}: {tower} takes images only; leave it out")
        for name in names:
            if mm_kwargs.get(name) is not None:
                return
        if mm_kwargs:
            raise InputError(
                f"mm_kwargs: expected at least one of {', '.join(names)}, the inputs of {tower}; got "
                f"{names_of(name for name, value in mm_kwargs.items() if value is not None)}; for a batch "
                "without items pass tensors without rows"
            )


def is_hugging_face(tower: nn.Module) -> bool:
    """Whether a configuration may choose a tower's attention. Without one transformers is not needed."""
    return any(hasattr(module, "config") for module in tower.modules())


# --- a call, and the options that change what it returns

_IGNORED = frozenset(
    {
        *("use_cache", "cache_position", "logits_to_keep", "num_items_in_batch"),
        *("vision_feature_layer", "vision_feature_layers", "vision_feature_select_strategy"),
        *("vision_aspect_ratio", "batch_num_images", "output_router_logits"),
    }
)
"""Options of a language model, or of the model around a tower."""

_OFF = frozenset({"output_attentions", "output_hidden_states", "interpolate_pos_encoding"})
"""Options that change nothing if they are False."""


def settle(
    kwargs: Mapping[str, Any], own_names: Iterable[str], matters: Callable[[str, Any], bool]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits the keyword arguments of a call into inputs (`own_names`) and options that change the result."""
    kept, changing = {}, {}
    for name, value in kwargs.items():
        if name in own_names:
            kept[name] = value
        elif name != "return_dict" and matters(name, value):
            changing[name] = value
    return kept, changing


def matters(name: str, value: Any) -> bool:
    """Whether an option changes what any tower returns; None stands for the default."""
    return not (value is None or name in _IGNORED or (name in _OFF and value is False))


def without_inference_tensors(values: Any) -> Any:
    """Copies inference-mode tensors in tuples and dictionaries, which would need a trace of their own."""
    if isinstance(values, torch.Tensor):
        if not values.is_inference():
            return values
        with torch.inference_mode(False):
            return values.clone()
    if isinstance(values, tuple):
        return tuple(map(without_inference_tensors, values))
    if isinstance(values, dict):
        return {name: without_inference_tensors(value) for name, value in values.items()}
    return values


class _Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    eager: MissReason | None = None
    """Why the tower itself serves it."""
    runs_as_it_is: bool = False
    """Whether it needs no `no_grad`: gradients are asked for, or off already, outside inference mode."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _settle(module: WrappedTower, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    kept, changing = settle(kwargs, module.input_names, module.matters)
    if changing or len(args) > len(module.input_names):
        return _Call(args, kwargs, MissReason.OPTIONS)
    if foreign_around() is not None:
        return _Call(args, kwargs, MissReason.FOREIGN_CODE)
    if torch.is_grad_enabled() and needs_gradients([*args, *kept.values()], module):
        return _Call(*module.traced_inputs(args, kept), runs_as_it_is=True)
    args, kept = without_inference_tensors((args, kept))
    # This check takes a twentieth of the time of entering both modes.
    if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        return _Call(*module.traced_inputs(args, kept), runs_as_it_is=True)
    with without_autograd():
        return _Call(*module.traced_inputs(args, kept))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call_uncompiled(
    module: WrappedTower, args: tuple[Any, ...], kwargs: dict[str, Any], reason: MissReason
) -> Any:
    module.eager_calls[reason] += 1
    allow_no_frame()
    # By position: a tower may have other names for its inputs than its adapter.
    named = [name for name in module.input_names[len(args) :] if name in kwargs]
    options = {name: value for name, value in kwargs.items() if name not in named}
    return module.call_tower(*args, *(kwargs[name] for name in named), **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _as_tuple(output: Any) -> Any:
    return output.to_tuple() if hasattr(output, "to_tuple") else output


def needs_gradients(inputs: Iterable[Any], module: nn.Module) -> bool:
    """Whether gradients are asked of any of the inputs or of the parameters of a module."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return any(tensor.requires_grad for tensor in (*tensors, *module.parameters()))


def with_own_attention(module: nn.Module) -> nn.Module:
    """A module on the same parameters with the attention from before it was wrapped."""
    if not is_hugging_face(module):
        return module
    from fxsplit_encoder.kernels.attention import hugging_face

    return hugging_face.with_own_attention(module)


def first_parameter(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], str]:
    """The dictionary that holds the first parameter of a module, and its key there."""
    for submodule in module.modules():
        for name, parameter in tensors_of(submodule)[0].items():
            if parameter is not None:
                return tensors_of(submodule)[0], name
    raise InputError(f"{type(module).__name__} has no parameters; expected a vision tower")


def registered_tower(name: str) -> Any:
    """The tower of that `registered_name`."""
    return WrappedTower.registered[name]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def trace_equal_blocks_once(tower_name: str, as_traced: str) -> bool:
    """Replaces equal blocks of a tower by ops in a trace, if it can. Dynamo guards the arguments."""
    from fxsplit_encoder.compile.blocks import begin_blocks

    tower = registered_tower(tower_name)
    tower.note_trace()
    return begin_blocks(tower.tower)
