"""vLLM's normalization of raw pixels (Qwen's towers get bytes) as PyTorch's operations in traces.

On a GPU vLLM calls a Triton kernel there, whatever its settings of custom ops say: no pass sees through it,
no compiler fuses it with the patch embedding that reads it, and nothing can be proved of its rows.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

_NAME = "FusedMMInputNorm"
_METHODS = ("forward_cuda", "forward_native")


def install_input_norm() -> None:
    """Has every such layer that vLLM builds from now on trace to PyTorch's operations; calling it again
    changes nothing. A vLLM without the layer, or with one that is built in another way, is left as it is.
    """
    try:
        from vllm.model_executor.custom_op import CustomOp, op_registry_oot
        from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm
    except ImportError:
        return
    if _NAME not in op_registry_oot and all(hasattr(FusedMMInputNorm, name) for name in _METHODS):
        CustomOp.register_oot(name=_NAME)(traceable_input_norm(FusedMMInputNorm))


@functools.cache
def traceable_input_norm(base: type[nn.Module]) -> type[nn.Module]:
    """A class like vLLM's `FusedMMInputNorm`, `base`, for traces."""

    class TraceableInputNorm(base):  # type: ignore[misc, valid-type]
        """vLLM's kernel, and where it is traced what vLLM runs without Triton."""

        def forward_cuda(self, pixel_values: Tensor, visual_dtype: torch.dtype) -> Tensor:
            """(patches, values of a patch), as the result, which is in `visual_dtype`."""
            traced = torch.compiler.is_compiling()
            forward = self.forward_native if traced else super().forward_cuda
            result: Tensor = forward(pixel_values, visual_dtype)
            return result

    return TraceableInputNorm
