"""vLLM's rotary embedding as PyTorch's operations while it is traced.

On a GPU vLLM calls a Triton kernel, which no pass sees through and no compiler fuses with what is around it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from fxsplit_encoder.integrations.vllm.compatibility import rotary_problem

_NAME = "ApplyRotaryEmb"


def install_rotary() -> str | None:
    """Has every encoder that vLLM builds from now on trace to PyTorch's operations; calling it again changes
    nothing. What keeps it from that; None: nothing.
    """
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    if (problem := rotary_problem(ApplyRotaryEmb)) is not None:
        return problem
    present = op_registry_oot.get(_NAME)
    if present is None:
        CustomOp.register_oot(name=_NAME)(traceable_rotary(ApplyRotaryEmb))
    elif not hasattr(present, "forward_traced"):
        return f"another plugin has replaced {_NAME} by {present.__qualname__}"
    return None


@functools.cache
def traceable_rotary(base: type[nn.Module]) -> type[nn.Module]:
    """A class like vLLM's `ApplyRotaryEmb`, `base`, for traces."""

    class TraceableRotary(base):  # type: ignore[misc, valid-type]
        """vLLM's kernel, and the same in PyTorch's operations where it is traced."""

        is_neox_style: bool

        def forward_cuda(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            """(batch, tokens, heads, head_size), or without the batch; (tokens, head_size // 2) twice."""
            whole = 2 * cos.shape[-1] == x.shape[-1]
            if whole and torch.compiler.is_compiling():
                return self.forward_traced(x, cos, sin)
            result: Tensor = super().forward_cuda(x, cos, sin)
            return result

        def forward_traced(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            """In float32, as the kernel computes, and rounded once."""
            result: Tensor = self.forward_static(x, cos.float(), sin.float(), self.is_neox_style, True)
            return result

    return TraceableRotary
