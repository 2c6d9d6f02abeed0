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

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fxsplit_encoder.attention.kernels import KERNELS, AttentionShape
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.messages import nearest

AUTO = "auto"
KERNEL_NAMES: tuple[str, ...] = tuple(kernel.name for kernel in KERNELS)

Condition = Callable[["AttentionShape"], bool]

_LONGEST_WINDOW = 256

_FLAGS: dict[str, Condition] = {
    "windowed": lambda shape: shape.segments > 1 and shape.longest <= _LONGEST_WINDOW,
    "full": lambda shape: not (shape.segments > 1 and shape.longest <= _LONGEST_WINDOW),
    "captured": lambda shape: not shape.host_lengths,
    "known": lambda shape: shape.host_lengths,
}
_NUMBERS = ("tokens", "longest", "segments", "head_dim")
_OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq}
_COMPARISON = re.compile(rf"({'|'.join(_NUMBERS)})\s*(<=|>=|<|>|=)\s*(\d+)")


class Pin(NamedTuple):
    """A kernel's name, or `auto`, for the shapes that fulfil every condition."""

    conditions: tuple[Condition, ...]
    kernel: str

    def holds(self, shape: AttentionShape) -> bool:
        """Whether it decides which kernel this shape gets."""
        return all(condition(shape) for condition in self.conditions)


def parse_attention(attention: str | Mapping[str, str]) -> tuple[Pin, ...]:
    """The pins of the setting `attention`, the first of which that holds counts.

    Raises:
        ConfigError: a kernel or a condition is unknown; every one of them is named.
    """
    if isinstance(attention, str):
        attention = {"": attention}
    problems: list[str] = []
    pins = []
    for key, kernel in attention.items():
        where = f"attention.{key}" if key else "attention"
        if kernel != AUTO and kernel not in KERNEL_NAMES:
            problems.append(f"{where}: {_unknown(str(kernel), (AUTO, *KERNEL_NAMES))}")
        conditions = []
        for text in filter(None, (part.strip() for part in key.split(","))):
            condition = _condition(text)
            if condition is None:
                problems.append(f"{where}: {_unknown(text, (*_FLAGS, *(f'{name}<=N' for name in _NUMBERS)))}")
            else:
                conditions.append(condition)
        pins.append(Pin(tuple(conditions), kernel))
    if problems:
        raise ConfigError(*problems)
    return tuple(pins)


def _condition(text: str) -> Condition | None:
    comparison = _COMPARISON.fullmatch(text)
    if comparison is None:
        return _FLAGS.get(text)
    name, sign, number = comparison.groups()
    compare, bound = _OPERATORS[sign], int(number)
    return lambda shape: bool(compare(getattr(shape, name), bound))


def _unknown(name: str, allowed: Sequence[str]) -> str:
    return f"unknown; {nearest(name, allowed)}allowed: {', '.join(allowed)}; got {name!r}"
