"""vLLM's attention with relative positions (SAM's, in DeepSeek-OCR) as PyTorch's operations in traces.

On a GPU vLLM calls a Triton kernel there, of whose module Inductor leaves out a number in torch 2.11, and
which the pass `decomposed_bias` does not see.
"""

from __future__ import annotations

import functools
import inspect

import torch
from torch import nn

_NAME = "RelPosAttention"
_SWITCH = "use_triton_attention"


def install_relative_positions() -> None:
    """Has every such layer that vLLM builds from now on trace to PyTorch's operations; calling it again
    changes nothing. A vLLM without the layer, or with one that calls no such kernel, needs nothing.
    """
    try:
        from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
        from vllm.model_executor.models.deepencoder import RelPosAttention
    except ImportError:
        return
    if _NAME not in op_registry_oot and _SWITCH in inspect.signature(RelPosAttention.__init__).parameters:
        PluggableLayer.register_oot(name=_NAME)(traceable_relative_positions(RelPosAttention))


@functools.cache
def traceable_relative_positions(base: type[nn.Module]) -> type[nn.Module]:
    """A class like vLLM's `RelPosAttention`, `base`, for traces."""

    class TraceableRelPosAttention(base):  # type: ignore[misc, valid-type]
        """vLLM's kernel, and where it is traced what vLLM runs without Triton."""

        @property
        def use_triton_attention(self) -> bool:
            """What the layer asks in its forward."""
            return self._has_kernel and not torch.compiler.is_compiling()

        @use_triton_attention.setter
        def use_triton_attention(self, has_kernel: bool) -> None:
            self._has_kernel = has_kernel

    return TraceableRelPosAttention
