"""transformers: which attention a module calls, hooks that collect outputs, and models without weights; and
accelerate, whose hooks stand around a module's forward.

Imports transformers where a function needs it, so that a tower of another library does not.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.tensors import forward_hooks_of

_ATTENTION = "_attn_implementation_internal"


def has_attention_implementation(config: Any) -> bool:
    """Whether a configuration names the attention that its module calls."""
    return hasattr(config, _ATTENTION)


def set_attention_implementation(config: Any, name: str) -> None:
    """Names a configuration's attention: the public setter imports flash-attn for names with "flash"."""
    setattr(config, _ATTENTION, name)


def attention_implementation(config: Any) -> str | None:
    """The attention that a configuration's module calls, by name; None: the model's own, or none."""
    name: str | None = getattr(config, _ATTENTION, None)
    return name


def install_output_hooks(module: nn.Module) -> None:
    """Makes the hooks now by which transformers collects hidden states: at their first use it takes a lock,
    which Dynamo cannot trace. There is no public way to have them made.
    """
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    if isinstance(module, PreTrainedModel):
        maybe_install_capturing_hooks(module)


def remove_output_hooks(module: nn.Module) -> None:
    """Takes these hooks out again. A trace of blocks alone, without the forward around them that says what to
    collect, cannot trace them.
    """
    for submodule in module.modules():
        hooks = forward_hooks_of(submodule)[1]
        for number in [number for number, hook in hooks.items() if collects_outputs(hook)]:
            del hooks[number]
        vars(submodule).pop("_output_capturing_hooks_installed", None)


def selected_hidden_states(option: Any) -> list[int] | None:
    """The layers whose hidden states `output_hidden_states` asks for; None: all, as before 5.23."""
    from transformers.utils import output_capturing

    select = getattr(output_capturing, "selected_hidden_states", None)
    return None if select is None else select(option)


def collects_outputs(hook: Any) -> bool:
    """Whether a hook is one by which transformers collects hidden states or attention weights."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def collected_by(hook: Any) -> tuple[str, int]:
    """What a hook that collects outputs was made for: `output_hook` makes it again in another process."""
    held = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return held["key"].cell_contents, held["index"].cell_contents


def output_hook(key: str, index: int) -> Any:
    """A hook as transformers makes it, which collects the output of that index under a key."""
    from transformers.utils.output_capturing import install_output_capuring_hook

    module = nn.Module()
    install_output_capuring_hook(module, key, index)
    (hook,) = forward_hooks_of(module)[1].values()
    return hook


def collects_attention(hook: Any) -> bool:
    """Whether a hook is the one by which transformers collects the weights of attention, if they are asked
    for. Kernels do not return them, so no tower of ours asks. What a hook collects is told by a variable of
    its closure alone.
    """
    if not collects_outputs(hook):
        return False
    keys = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return "key" in keys and keys["key"].cell_contents == "attentions"


INNER_FORWARD = "_old_forward"
"""Where a module keeps the forward that accelerate's hook surrounds, of which no public API tells."""


BOOKKEEPING = (
    *("_is_hf_initialized", "_output_capturing_hooks_installed", "_hf_hook", INNER_FORWARD),
    *("dtype", "torch_dtype", "architectures", "transformers_version", "_name_or_path", "_commit_hash"),
)
"""What the two libraries write down on modules and configurations, and no forward computes with."""


def device_hook(module: nn.Module) -> Any:
    """The hook of accelerate that surrounds a module's forward; None: there is none."""
    return getattr(module, "_hf_hook", None)


def no_init_weights() -> contextlib.AbstractContextManager[object]:
    """Models that are made within draw no weights. The public ways to that read a checkpoint."""
    from transformers import initialization

    return initialization.no_init_weights()


def llama4_angles(rotary_embedding: Any) -> Tensor:
    """The complex rotations of every patch of a Llama 4 vision tower, in float32, computed again: its public
    buffer is cast with the tower, which drops the imaginary part.
    """
    with torch.device("cpu"):  # not the default device
        angles: Tensor = rotary_embedding._compute_freqs_ci(rotary_embedding.config)
    return angles
