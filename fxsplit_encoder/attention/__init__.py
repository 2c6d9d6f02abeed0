"""The splitting op `fxsplit::varlen_attention` and its kernels.

Attention is where the graph is cut: it is the one operation that mixes rows (tokens), so everything between
two attentions may be padded, compiled once for every token count, and captured.
"""

from fxsplit_encoder.attention.kernels import attend, attend_out
from fxsplit_encoder.attention.known_segments import KnownSegments
from fxsplit_encoder.attention.op import varlen_attention, varlen_attention_out

__all__ = ["KnownSegments", "attend", "attend_out", "varlen_attention", "varlen_attention_out"]
