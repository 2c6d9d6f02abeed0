"""The arguments of a processor for one item alone, which come from outside: their names and their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.messages import name_of, nearest, shown


@dataclass(frozen=True)
class OptionCheck:
    """What an option may be."""

    expected: str
    fits: Callable[[object], bool]


def integers(most: Mapping[str, int]) -> dict[str, OptionCheck]:
    """Options that are integers from 1 to the number given for each."""
    return {name: _integer(last) for name, last in most.items()}


def _integer(most: int) -> OptionCheck:
    def fits(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most

    return OptionCheck(f"an integer from 1 to {most}", fits)


def _is_positive(value: object) -> bool:
    return (
        type(value) is not bool and isinstance(value, int | float | np.number) and bool(0 < value < math.inf)
    )


def _is_a_part(value: object) -> bool:
    return isinstance(value, int | float | np.number) and _is_positive(value) and bool(value <= 1)


_POSITIVE = OptionCheck("a number above 0", _is_positive)
_FRAMES = _integer(1 << 16)

SAMPLING: Mapping[str, OptionCheck] = {
    "do_sample_frames": OptionCheck("True or False", lambda value: isinstance(value, bool)),
    "fps": _POSITIVE,
    "num_frames": _FRAMES,
    "min_frames": _FRAMES,
    "max_frames": _FRAMES,
    "max_duration": _POSITIVE,
}
"""Which frames of a video are seen."""


SCALE = "scale"
"""By which both sides of an image or of a video's frames are shrunk before the processor sees them."""

ANY: Mapping[str, OptionCheck] = {SCALE: OptionCheck("a number above 0, up to 1", _is_a_part)}
"""What any processor's images and videos may have."""


def check_options(options: Mapping[str, object], allowed: Mapping[str, OptionCheck]) -> None:
    """Raises MediaError for an option of another name, or of another value than it may have."""
    for name, value in options.items():
        if name not in allowed:
            raise MediaError(
                f"options: {name_of(name)} is unknown; {nearest(str(name), list(allowed))}"
                f"expected one of {', '.join(allowed) or 'none'}"
            )
        if not allowed[name].fits(value):
            raise MediaError(f"options: {name}: expected {allowed[name].expected}; got {shown(value)}")
