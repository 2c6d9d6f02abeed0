"""The splitting op `fxsplit::varlen_attention`, its kernels, and the measured choice between them.

Attention alone mixes rows (tokens), so graphs are cut there: all between may be padded and captured.
"""

from fxsplit_encoder.kernels.attention.attention_kernel import AttentionKernel, AttentionShape
from fxsplit_encoder.kernels.attention.chooser import (
    KERNEL_NAMES,
    KERNELS,
    KernelChooser,
    current_chooser,
    parse_attention,
)
from fxsplit_encoder.kernels.attention.known_segments import KnownSegments
from fxsplit_encoder.kernels.attention.op import (
    attend,
    attend_out,
    dense_attention,
    varlen_attention,
    varlen_attention_out,
)

__all__ = [
    "KERNELS",
    "KERNEL_NAMES",
    "AttentionKernel",
    "AttentionShape",
    "KernelChooser",
    "KnownSegments",
    "attend",
    "attend_out",
    "current_chooser",
    "dense_attention",
    "parse_attention",
    "varlen_attention",
    "varlen_attention_out",
]
