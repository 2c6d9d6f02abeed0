"""The splitting op `fxsplit::varlen_attention`, its kernels, and the measured choice between them.

Attention alone mixes rows (tokens), so graphs are cut there: all between may be padded and captured.
"""

from fxsplit_encoder.kernels.attention.attention_kernel import AttentionKernel, AttentionShape
from fxsplit_encoder.kernels.attention.chooser import KERNELS, KernelChooser
from fxsplit_encoder.kernels.attention.op import KnownSegments, attend, dense_attention, varlen_attention

__all__ = [
    "KERNELS",
    "AttentionKernel",
    "AttentionShape",
    "KernelChooser",
    "KnownSegments",
    "attend",
    "dense_attention",
    "varlen_attention",
]
