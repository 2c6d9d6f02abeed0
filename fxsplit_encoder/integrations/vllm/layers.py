"""vLLM's encoder attention through `fxsplit::varlen_attention`, at which towers are split."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder.integrations.vllm.compatibility import ATTENTION, ROTARY, member_problem
from fxsplit_encoder.kernels.attention import varlen_attention

# Bounds of the longest segment by layer and tokens, while they are noted.
_noted: ContextVar[dict[Any, dict[int, int]] | None] = ContextVar("fxsplit_encoder_vllm_bounds", default=None)


def install_attention() -> str | None:
    """Has encoders that vLLM builds from now on attend through this library's op; what prevents it."""
    from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

    problem = member_problem(MMEncoderAttention, ATTENTION)
    return problem or _register("MMEncoderAttention", split_attention(MMEncoderAttention), "segment_bound")


def _register(name: str, layer: type[nn.Module], own: str) -> str | None:
    """Puts a layer with a member `own` in place of vLLM's of a name, once; what prevents it."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot

    present = op_registry_oot.get(name)
    if present is None:
        CustomOp.register_oot(name=name)(layer)
    elif not hasattr(present, own):
        return f"another plugin has replaced {name} by {present.__qualname__}"
    return None


@functools.cache
def split_attention(base: type[nn.Module]) -> type[nn.Module]:
    """A class like vLLM's `MMEncoderAttention`, `base`, for this library's op."""

    class SplitAttention(base):  # type: ignore[misc, valid-type]
        """Packed attention through `fxsplit::varlen_attention`, that of batches through torch's."""

        segment_bound: int | None = None
        """What no segment is longer than at any size, as with windows; None: nothing is known."""

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            cu_seqlens: Tensor | None = None,
            max_seqlen: Tensor | None = None,
            sequence_lengths: Tensor | None = None,
        ) -> Tensor:
            """(batch, tokens, heads * head_size) or (batch, tokens, heads, head_size) each, as the result."""
            if _keeps_own(self):
                result: Tensor = super().forward(query, key, value, cu_seqlens, max_seqlen, sequence_lengths)
                return result
            return attend(self, (query, key, value), cu_seqlens, max_seqlen)

    return SplitAttention


def _keeps_own(layer: Any) -> bool:
    """Whether the layer runs a kernel of vLLM that needs inputs in its own layout."""
    return bool(layer.attn_backend.name == "FLASHINFER" or layer.fp8_enabled)


def attend(
    layer: Any, given: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor | None, max_seqlen: Tensor | None
) -> Tensor:
    """Attention of a layer of vLLM's, which has `num_heads`, `num_kv_heads`, `head_size` and `scale`."""
    batch = given[0].shape[0]
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    q, k, v = (
        tensor.reshape(batch, tensor.shape[1], number, layer.head_size)
        for tensor, number in zip(given, heads, strict=True)
    )
    if layer.num_kv_heads != layer.num_heads:
        k, v = (each.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=2) for each in (k, v))
    if cu_seqlens is None:
        out = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=layer.scale
        ).transpose(1, 2)
    else:
        packed = [each.flatten(0, 1) for each in (q, k, v)]
        bound = _bound(layer, max_seqlen, packed[0])
        out = varlen_attention(*packed, cu_seqlens, bound, layer.scale).view(q.shape)
    return out.reshape(given[0].shape)


# --- the longest segment
#
# vLLM gives it as a tensor on the host, a number that a trace cannot read. How long windows are is the same
# at every size, and attention over them with the bound of a whole image would launch mostly empty blocks.


def _bound(layer: Any, max_seqlen: Tensor | None, query: Tensor) -> int:
    """Returns the longest segment, or an upper bound where the host does not know it."""
    tokens = query.shape[0]
    if torch.compiler.is_compiling():
        return tokens if layer.segment_bound is None else layer.segment_bound
    noted = _noted.get()
    if noted is not None and max_seqlen is not None:
        noted[layer][tokens] = int(max_seqlen)
    if max_seqlen is None or max_seqlen.device == query.device:
        return tokens
    return min(int(max_seqlen), tokens) or tokens


@contextlib.contextmanager
def noting_bounds() -> Iterator[None]:
    """Layers whose bound is the same for all sizes that are run inside, and less than each, keep it."""
    noted: dict[Any, dict[int, int]] = defaultdict(dict)
    token = _noted.set(noted)
    try:
        yield
    finally:
        _noted.reset(token)
    for layer, by_tokens in noted.items():
        bounds = set(by_tokens.values())
        if len(by_tokens) > 1 and len(bounds) == 1 and 0 < max(bounds) < min(by_tokens):
            layer.segment_bound = bounds.pop()


# --- rotary embeddings, pixels' norm and relative positions
#
# On a GPU vLLM calls a Triton kernel for each, which no pass sees through and no compiler fuses with what is
# around it. In traces they are PyTorch's operations, as vLLM computes without Triton.


def install_rotary() -> str | None:
    """Has encoders that vLLM builds from now on trace to PyTorch's operations. Returns what prevents it."""
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    problem = member_problem(ApplyRotaryEmb, ROTARY)
    return problem or _register("ApplyRotaryEmb", traceable_rotary(ApplyRotaryEmb), "forward_traced")


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


def install_input_norm() -> None:
    """Has such layers that vLLM builds from now on trace to PyTorch's operations, if it knows them."""
    try:
        from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm
    except ImportError:
        return
    if all(hasattr(FusedMMInputNorm, name) for name in ("forward_cuda", "forward_native")):
        _register("FusedMMInputNorm", traceable_input_norm(FusedMMInputNorm), "forward_cuda")


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


_RELATIVE_POSITIONS = "RelPosAttention"
_SWITCH = "use_triton_attention"


def install_relative_positions() -> None:
    """Has such layers that vLLM builds from now on trace to PyTorch's operations, if they call a kernel."""
    try:
        from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
        from vllm.model_executor.models.deepencoder import RelPosAttention
    except ImportError:
        return
    if (
        _RELATIVE_POSITIONS not in op_registry_oot
        and _SWITCH in inspect.signature(RelPosAttention.__init__).parameters
    ):
        PluggableLayer.register_oot(name=_RELATIVE_POSITIONS)(traceable_relative_positions(RelPosAttention))


@functools.cache
def traceable_relative_positions(base: type[nn.Module]) -> type[nn.Module]:
    """A class like vLLM's `RelPosAttention`, `base`, for traces."""

    class TraceableRelPosAttention(base):  # type: ignore[misc, valid-type]
        """vLLM's kernel, and where it is traced what vLLM runs without Triton."""

        @property
        def use_triton_attention(self) -> bool:
            """Whether the layer's forward calls vLLM's Triton kernel; never while it is traced."""
            return self._has_kernel and not torch.compiler.is_compiling()

        @use_triton_attention.setter
        def use_triton_attention(self, has_kernel: bool) -> None:
            self._has_kernel = has_kernel

    return TraceableRelPosAttention
