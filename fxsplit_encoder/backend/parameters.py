"""The parameters of a call, and whether captures still read them where they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from operator import eq, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.capture.parameters import MemoryOrders
from fxsplit_encoder.compile import Program
from fxsplit_encoder.compile.blocks import LiveWeights
from fxsplit_encoder.runtime.captured_program import check_replacements, layouts_of

_WHAT_TO_DO = "Compile the module again after torch._dynamo.reset()"


class CallParameters:
    """Parameters of a program: those among the arguments of a call, and the weights of blocks.

    Args:
        weights: of blocks, which a call is not given.
        seconds: between two looks at them; 0: every call looks.
    """

    def __init__(self, program: Program, weights: LiveWeights, seconds: float) -> None:
        self._live = weights
        self._seconds = seconds
        self._last_look = 0.0
        self._memory: list[Tensor] = []
        num_given = program.num_inputs - len(weights)
        self._given_of = _picker(sorted(index for index in program.static_inputs if index < num_given))
        self._layouts: list[tuple[Any, ...] | None] | None = None
        self._given: Sequence[Any] = ()
        self._weights: Sequence[Tensor] | None = None
        self._addresses: list[int] = []
        self._orders = MemoryOrders(())
        self._permutable_of = _picker(())
        self.have_moved = False
        """Whether those of the last call lay elsewhere than those of the call before it."""
        self.are_the_same = False
        """Whether the last two calls had the same tensors, at the same addresses if they looked."""

    def current(self, args: Sequence[Any]) -> Sequence[Tensor]:
        """The weights of blocks now, after all parameters have been looked at. Captures read them by address
        (capture rule 6).

        Raises:
            WeightsLayoutError: one has another layout than it was compiled for, or was removed.
            InputError: a block has changed.
        """
        given = self._given_of(args)
        self.have_moved = False
        self.are_the_same = all(map(is_, given, self._given))
        self._given = given
        now = time.monotonic() if self._seconds else 0.0
        if self._weights is not None and now < self._last_look + self._seconds:
            return self._weights
        weights = self._live.current()
        self.are_the_same = self.are_the_same and weights is self._weights
        if not self._are_where_they_were(given, weights):
            self._take(given, weights)
        self._last_look = now  # one that raised is made again
        return weights

    def look_again(self) -> None:
        """Has the next call look, whenever the last one did."""
        self._last_look = float("-inf")

    def _are_where_they_were(self, given: Sequence[Any], weights: Sequence[Tensor]) -> bool:
        # An address alone does not tell: a matrix and its transpose may have the same one.
        if weights is not self._weights:
            return False
        # Each has to be asked: `parameter.data = ...` changes its address and neither its identity nor its
        # version. Without lists of hundreds of numbers more of the processor's cache is left for others.
        addresses = map(torch.Tensor.data_ptr, chain(given, weights))
        try:
            if not all(map(eq, addresses, self._addresses)):
                return False
            return self._orders.are_those_of(self._permutable_of([*given, *weights]))
        except TypeError:  # one was removed
            return False

    def _take(self, given: Sequence[Any], weights: Sequence[Tensor]) -> None:
        values = [*given, *weights]
        if self._layouts is None:
            self._layouts = layouts_of(values)
        check_replacements(self._layouts, values, _WHAT_TO_DO)
        addresses = list(map(torch.Tensor.data_ptr, values))
        self.have_moved = addresses != self._addresses
        self.are_the_same = self.are_the_same and not self.have_moved
        self._weights, self._addresses = weights, addresses
        self._orders = MemoryOrders(values)
        self._permutable_of = _picker(self._orders.indices)
        if self._seconds:
            # Until the next look captures may read what parameters have left.
            self._memory = [value.detach() for value in values if isinstance(value, torch.Tensor)]


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What returns the items at these indices, without Python for each of them."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda items: [items[index] for index in indices]
