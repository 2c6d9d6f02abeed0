"""Which graphs may be padded: the proof of row independence, its states and its rules."""

from fxsplit_encoder.compile.padding.analysis import PaddingReport, analyse
from fxsplit_encoder.compile.padding.states import SEGMENTS, SHARED, Rows, State, token_dim

__all__ = ["SEGMENTS", "SHARED", "PaddingReport", "Rows", "State", "analyse", "token_dim"]
