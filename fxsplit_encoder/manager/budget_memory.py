"""Whether a device's memory can hold the budgets of a path at all, known before any of them is made."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from fxsplit_encoder.capture.memory import gibibytes, memory_of
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.manager.path_forward import PathForward

# Inputs of a token are seldom larger than this many times its output. Where so many outputs fit, inputs are
# not made to find out their size.
_INPUTS_OF_AN_OUTPUT = 64

# Sizes at which inputs are made to find out how they grow: this one or the tower's own, and its doubles.
_SMALL_TOKENS = 16
_DOUBLINGS = 8


def check_budgets(forward: PathForward, *, tile: int | None, out_hidden_size: int, field: str) -> None:
    """Raises ConfigError for budgets whose static inputs and output no memory of the device holds.

    Nothing of a budget's size is allocated: what inputs take is known from small ones, with which it grows in
    proportion.

    Args:
        forward: of the path, with its budgets.
        tile: the smallest size that the path can have; None: any.
        out_hidden_size: columns of the output.
        field: where the settings list the budgets.
    """
    budgets, memory = forward.budgets, memory_of(forward.device)
    output = out_hidden_size * forward.dtype.itemsize
    if not budgets or budgets[-1] * output * _INPUTS_OF_AN_OUTPUT <= memory:
        return
    first = tile or _SMALL_TOKENS
    a_token, fixed = _input_bytes(forward, [first << power for power in range(_DOUBLINGS)], budgets[-1])
    needed = int(fixed + budgets[-1] * (a_token + output))
    if needed > memory:
        fitting = max(0, int((memory - fixed) / (a_token + output)))
        raise ConfigError(
            f"{field}: {budgets[-1]} output tokens take {gibibytes(needed)} of static inputs and output, and "
            f"{forward.device} has {gibibytes(memory)}; allowed: budgets of at most {fitting}, less what "
            f"captures take beside; got {list(budgets[-3:])}"
        )


def _input_bytes(forward: PathForward, sizes: Sequence[int], below: int) -> tuple[float, float]:
    """Bytes of the inputs a token, and those beside, from the first two sizes that the tower makes inputs
    of; none where it makes fewer.
    """
    known: list[tuple[int, int]] = []
    for size in sizes:
        if size < below and len(known) < 2:
            with contextlib.suppress(InputError):
                values = forward.capture_values(size)
                known.append((size, sum(tensor.nbytes for tensor in values.values())))
    if len(known) < 2:
        return 0.0, 0.0
    (small, few), (large, many) = known
    a_token = max(0.0, (many - few) / (large - small))
    return a_token, max(0.0, few - a_token * small)
