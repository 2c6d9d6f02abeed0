"""transformers: which attention a module calls, hooks that collect outputs, and models without weights.

Imports transformers where a function needs it, so that a tower of another library does not.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn

_ATTENTION = "_attn_implementation_internal"


def has_attention_implementation(config: Any) -> bool:
    """Whether a configuration names the attention that its module calls."""
    return hasattr(config, _ATTENTION)


def set_attention_implementation(config: Any, name: str) -> None:
    """Names the attention that a configuration's module calls. The public setter imports the flash-attn
    package for any name that contains "flash".
    """
    setattr(config, _ATTENTION, name)


def install_output_hooks(module: nn.Module) -> None:
    """Makes the hooks now by which transformers collects hidden states: at their first use it takes a lock,
    which Dynamo cannot trace. There is no public way to have them made.
    """
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    if isinstance(module, PreTrainedModel):
        maybe_install_capturing_hooks(module)


def collects_attention(hook: Any) -> bool:
    """Whether a hook is the one by which transformers collects the weights of attention, if they are asked
    for. Kernels do not return them, so no tower of ours asks. What a hook collects is told by a variable of
    its closure alone.
    """
    if getattr(hook, "__module__", None) != "transformers.utils.output_capturing":
        return False
    keys = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return "key" in keys and keys["key"].cell_contents == "attentions"


def no_init_weights() -> contextlib.AbstractContextManager[object]:
    """Models that are made within draw no weights. The public ways to that read a checkpoint."""
    from transformers import initialization

    return initialization.no_init_weights()


def llama4_angles(rotary_embedding: Any) -> Tensor:
    """The complex rotations of every patch of a Llama 4 vision tower, in float32, computed again: its public
    buffer is cast with the tower, which drops the imaginary part.
    """
    angles: Tensor = rotary_embedding._compute_freqs_ci(rotary_embedding.config)
    return angles
