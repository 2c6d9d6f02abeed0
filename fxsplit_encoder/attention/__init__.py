"""The splitting op `fxsplit::varlen_attention`, its kernels, and the measured choice between them.

Attention is where the graph is cut: it is the one operation that mixes rows (tokens), so everything between
two attentions may be padded, compiled once for every token count, and captured.
"""

from fxsplit_encoder.attention.choice import KernelChooser, current_chooser
from fxsplit_encoder.attention.known_segments import KnownSegments
from fxsplit_encoder.attention.op import (
    attend,
    attend_out,
    dense_attention,
    varlen_attention,
    varlen_attention_out,
)
from fxsplit_encoder.attention.pins import KERNEL_NAMES, parse_attention

__all__ = [
    "KERNEL_NAMES",
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
