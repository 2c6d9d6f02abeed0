"""Kernels that a user pins, for all calls of an operation or for some.

A setting is `auto`, a kernel's name, or a mapping from keys to these. A key is one or more conditions,
separated by commas, all of which must hold; the first key that holds counts, and where none does the kernel
is chosen as with `auto`. Conditions are words, and comparisons of a number of the call: <=, <, >=, > and =.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.kernels.base import ShapeT
from fxsplit_encoder.messages import nearest

AUTO = "auto"

Condition = Callable[[Any], bool]

_OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq}
_COMPARISON = re.compile(r"(\w+)\s*(<=|>=|<|>|=)\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Pin(Generic[ShapeT]):
    """A kernel's name, or `auto`, for the calls that fulfil every condition."""

    conditions: tuple[Condition, ...]
    kernel: str

    def holds(self, shape: ShapeT) -> bool:
        """Whether it decides which kernel this call gets."""
        return all(condition(shape) for condition in self.conditions)


@dataclass(frozen=True)
class PinGrammar(Generic[ShapeT]):
    """What the setting of one operation may say."""

    setting: str
    kernels: tuple[str, ...]
    words: Mapping[str, Callable[[ShapeT], bool]]
    numbers: tuple[str, ...]
    """Attributes of a call that are compared."""

    def parse(self, value: str | Mapping[str, str]) -> tuple[Pin[ShapeT], ...]:
        """The pins of a setting, the first of which that holds counts.

        Raises:
            ConfigError: a kernel or a condition is unknown; every one of them is named.
        """
        if isinstance(value, str):
            value = {"": value}
        problems: list[str] = []
        pins: list[Pin[ShapeT]] = []
        for key, kernel in value.items():
            where = f"{self.setting}.{key}" if key else self.setting
            if kernel != AUTO and kernel not in self.kernels:
                problems.append(f"{where}: {_unknown(str(kernel), (AUTO, *self.kernels))}")
            conditions: list[Condition] = []
            for text in filter(None, (part.strip() for part in key.split(","))):
                condition = self._condition(text)
                if condition is None:
                    known = (*self.words, *(f"{name}<=N" for name in self.numbers))
                    problems.append(f"{where}: {_unknown(text, known)}")
                else:
                    conditions.append(condition)
            pins.append(Pin(tuple(conditions), kernel))
        if problems:
            raise ConfigError(*problems)
        return tuple(pins)

    def _condition(self, text: str) -> Condition | None:
        comparison = _COMPARISON.fullmatch(text)
        if comparison is None:
            return self.words.get(text)
        name, sign, number = comparison.groups()
        if name not in self.numbers:
            return None
        compare, bound = _OPERATORS[sign], int(number)
        return lambda shape: bool(compare(getattr(shape, name), bound))


def _unknown(name: str, allowed: Sequence[str]) -> str:
    return f"unknown; {nearest(name, allowed)}allowed: {', '.join(allowed)}; got {name!r}"
