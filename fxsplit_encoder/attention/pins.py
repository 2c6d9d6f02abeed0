"""The setting `attention`: kernels that a user pins, for all shapes or for some.

    attention: auto
    attention: flash_attn_4
    attention:
      windowed: torch_flash
      tokens>4096, segments=1: flash_attn_4

A key is one or more conditions, separated by commas, all of which must hold; the first key that holds counts,
and where none does the kernel is chosen as with `auto`. Conditions:

    windowed, full        several segments of at most 256 tokens, or not
    captured, known       inside a CUDA graph, or where the host knows the segments
    tokens<=N             the packed tokens of a call; also <, >=, > and =
    longest<=N            the longest segment, or its bound in a CUDA graph
    segments<=N           the segments, or the capacity for them in a CUDA graph
    head_dim=N            the width of a head
"""

from __future__ import annotations

from collections.abc import Mapping

from fxsplit_encoder.attention.kernels import KERNELS, AttentionShape
from fxsplit_encoder.kernels import Pin, PinGrammar

KERNEL_NAMES: tuple[str, ...] = tuple(kernel.name for kernel in KERNELS)

_LONGEST_WINDOW = 256


def _is_windowed(shape: AttentionShape) -> bool:
    return shape.segments > 1 and shape.longest <= _LONGEST_WINDOW


_GRAMMAR: PinGrammar[AttentionShape] = PinGrammar(
    AttentionShape.operation,
    KERNEL_NAMES,
    words={
        "windowed": _is_windowed,
        "full": lambda shape: not _is_windowed(shape),
        "captured": lambda shape: shape.is_captured,
        "known": lambda shape: shape.host_lengths,
    },
    numbers=("tokens", "longest", "segments", "head_dim"),
)


def parse_attention(attention: str | Mapping[str, str]) -> tuple[Pin[AttentionShape], ...]:
    """The pins of the setting `attention`, the first of which that holds counts.

    Raises:
        ConfigError: a kernel or a condition is unknown; every one of them is named.
    """
    return _GRAMMAR.parse(attention)
