"""transformers, imported when used: attention by name, hooks, models without weights; accelerate's hooks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.tensors import forward_hooks_of
from fxsplit_encoder.errors import UnsupportedTowerError

_ATTENTION = "_attn_implementation_internal"


def has_attention_implementation(config: Any) -> bool:
    """Whether a configuration names the attention that its module calls."""
    return hasattr(config, _ATTENTION)


def set_attention_implementation(config: Any, name: str) -> None:
    """Names a configuration's attention; the public setter imports flash-attn for names with "flash"."""
    setattr(config, _ATTENTION, name)


def attention_implementation(config: Any) -> str | None:
    """Returns the name of a configuration's attention; None: the model's own, or none."""
    name: str | None = getattr(config, _ATTENTION, None)
    return name


def install_output_hooks(module: nn.Module) -> None:
    """Installs transformers' hooks for hidden states: first use takes a lock, which Dynamo cannot trace."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    if isinstance(module, PreTrainedModel):
        maybe_install_capturing_hooks(module)


def remove_output_hooks(module: nn.Module) -> None:
    """Removes these hooks: a trace of blocks alone, without the forward around them, cannot trace them."""
    for submodule in module.modules():
        hooks = forward_hooks_of(submodule)[1]
        for number in [number for number, hook in hooks.items() if collects_outputs(hook)]:
            del hooks[number]
        vars(submodule).pop("_output_capturing_hooks_installed", None)


def selected_hidden_states(option: Any) -> list[int] | None:
    """Returns the layers that `output_hidden_states` names; None: all, as before 5.23."""
    from transformers.utils import output_capturing

    select = getattr(output_capturing, "selected_hidden_states", None)
    return None if select is None else select(option)


def collects_outputs(hook: Any) -> bool:
    """Whether a hook is one by which transformers collects hidden states or attention weights."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def collected_by(hook: Any) -> tuple[str, int]:
    """Returns the arguments with which `output_hook` makes a hook again in another process."""
    held = _closure_of(hook)
    return held["key"], held["index"]


def output_hook(key: str, index: int) -> Any:
    """Returns transformers' hook that collects the output of that index under a key."""
    from transformers.utils.output_capturing import install_output_capuring_hook

    module = nn.Module()
    install_output_capuring_hook(module, key, index)
    (hook,) = forward_hooks_of(module)[1].values()
    return hook


def collects_attention(hook: Any) -> bool:
    """Whether a hook of transformers collects attention weights, which no kernel returns."""
    return collects_outputs(hook) and _closure_of(hook).get("key") == "attentions"


def _closure_of(hook: Any) -> dict[str, Any]:
    cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


INNER_FORWARD = "_old_forward"
"""Where a module keeps the forward that accelerate's hook surrounds."""

BOOKKEEPING = (
    *("_is_hf_initialized", "_output_capturing_hooks_installed", "_hf_hook", INNER_FORWARD),
    *("dtype", "torch_dtype", "architectures", "transformers_version", "_name_or_path", "_commit_hash"),
)
"""Attributes of both libraries with which no forward computes."""


def device_hook(module: nn.Module) -> Any:
    """Returns accelerate's hook around a module's forward, or None."""
    return getattr(module, "_hf_hook", None)


def no_init_weights() -> contextlib.AbstractContextManager[object]:
    """Makes models inside draw no weights; public ways read a checkpoint."""
    from transformers import initialization

    return initialization.no_init_weights()


def llama4_angles(rotary_embedding: Any) -> Tensor:
    """Returns the complex rotations of a Llama 4 tower in float32: its buffer loses the imaginary part."""
    with torch.device("cpu"):  # not the default device
        angles: Tensor = rotary_embedding._compute_freqs_ci(rotary_embedding.config)
    return angles


# --- host metadata of packed patches


class VisionCall(NamedTuple):
    """A function of `transformers.vision_utils` by its name, and its arguments but grids."""

    function: str
    arguments: tuple[tuple[str, Any], ...]


def vision_calls(
    run: Callable[[], Any], grids: Tensor
) -> tuple[Any, tuple[VisionCall, ...], tuple[str, ...]]:
    """Calls a forward with `grids`. Returns its result, the functions that it calls for metadata which it
    also takes by name, and the names by which it takes lengths of longest segments. A profiler sees calls:
    modules import the functions by name. UnsupportedTowerError for metadata of other inputs.
    """
    from transformers import vision_utils
    from transformers.utils import generic

    frames: dict[Any, VisionCall] = {}
    bounds: list[str] = []
    errors: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename not in (vision_utils.__file__, generic.__file__):
            return
        given = dict(frame.f_locals)
        taken = given.pop("kwargs", None)
        if code.co_name == "get_max_seqlen" and taken is not None and given["kwarg_name"] not in taken:
            bounds.append(given["kwarg_name"])
        elif code.co_name.startswith("get_vision_") and taken is not None:
            first = given.pop(code.co_varnames[0])
            frames.pop(frame.f_back, None)  # passes them on
            others = [
                name for name, value in given.items() if not isinstance(value, int | float | str | None)
            ]
            if code.co_name == "get_vision_attention_seqlens":
                others = []
            elif first.shape != grids.shape or not first.cpu().equal(grids):
                others = [code.co_varnames[0]]
            if others:
                errors.append(f"its forward calls {code.co_name} with {', '.join(others)} of its own")
            frames[frame] = VisionCall(code.co_name, tuple(sorted(given.items())))

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        result = run()
    finally:
        sys.setprofile(previous)
    if errors:
        raise UnsupportedTowerError(errors[0])
    return result, tuple(dict.fromkeys(frames.values())), tuple(dict.fromkeys(bounds))


def vision_values(call: VisionCall, grids: Sequence[tuple[int, int, int]]) -> dict[str, Tensor]:
    """Returns what a function makes of grids on the CPU, by the names that a forward takes."""
    from transformers import vision_utils

    names = _Names()
    function: Any = getattr(vision_utils, call.function)
    with torch.inference_mode(False):
        result = function(torch.tensor(grids, device="cpu"), **dict(call.arguments), kwargs=names)
    values = result if isinstance(result, tuple) else (result,)
    return dict(zip(names.asked, values, strict=True))


class _Names(dict[str, Any]):
    """Records the names that are looked up in it, and contains none."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def pop(self, name: str, default: Any = None) -> Any:
        """The default."""
        self.asked.append(name)
        return default
