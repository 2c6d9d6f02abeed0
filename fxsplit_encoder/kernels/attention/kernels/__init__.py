"""The kernels behind `fxsplit::varlen_attention`; which of them runs is measured (`attention.choice`)."""

from fxsplit_encoder.kernels.attention.kernels.base import AttentionKernel, AttentionShape
from fxsplit_encoder.kernels.attention.kernels.builtin import (
    BatchedDense,
    Masked,
    PerSegment,
    TorchFlash,
    TritonVarlen,
)
from fxsplit_encoder.kernels.attention.kernels.cudnn_varlen import CudnnVarlen
from fxsplit_encoder.kernels.attention.kernels.flash_attn import (
    DenseFlashAttention4,
    FlashAttention4,
    WholeWaves,
)
from fxsplit_encoder.kernels.attention.kernels.vllm_flash_attn import VllmFlashAttention

__all__ = ["KERNELS", "AttentionKernel", "AttentionShape"]

# Segments up to which FlashAttention 4 may be faster with smaller tiles than its own: on an H200 it is up to
# 400 and 1764 tokens (docs/attention.md).
_SHORT, _MEDIUM = 512, 2048

KERNELS: tuple[AttentionKernel, ...] = (
    TorchFlash(),
    CudnnVarlen(),
    FlashAttention4(),
    FlashAttention4((64, 128), up_to=_SHORT),
    FlashAttention4((128, 128), up_to=_MEDIUM, probabilities_in_registers=True),
    WholeWaves((64, 128)),
    WholeWaves((128, 128), probabilities_in_registers=True),
    DenseFlashAttention4(),
    DenseFlashAttention4((128, 128), up_to=_MEDIUM, probabilities_in_registers=True),
    VllmFlashAttention(),
    TritonVarlen(64, 64, num_warps=4),
    BatchedDense(),
    PerSegment(),
    Masked(),
)
"""In order of preference where nothing was measured."""
