"""A run of an entry: drawn at random, and compared with eager call by call."""

from __future__ import annotations

import copy
import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.backend import BudgetDispatcher, dispatchers

from .comparing import difference, tensors_in
from .entries import Entry, input_names
from .inputs import INPUTS, make_inputs
from .placing import Placed

DTYPES = (torch.float32, torch.bfloat16)
LADDERS = ([8, 16, 32, 64], [4, 64], [12, 48], [8, 16, 32, 64])
DEFAULT_LADDER = [2**power for power in range(15)]
_NUM_CALLS = (2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6, 7, 8, 9, 12, 40)
_LARGE = (65, 81, 100, 130)


@dataclass(frozen=True, slots=True)
class Case:
    """What was drawn for a run; it prints as what one needs to know of a failure."""

    layout: str
    place: str
    lively: bool
    dtype: torch.dtype
    warmup: str
    budgets: tuple[int, ...]
    mode: str
    dynamic: str
    inference: bool
    counts: tuple[int, ...]
    seed: int


def draw(name: str, entry: Entry, number: int, *, captured: bool = False) -> Case:
    """A case for an entry, the same one for the same name and number; the dtypes take turns.

    Args:
        captured: whether it must be such that something counts the tokens, so that they may be padded.
    """
    rng = random.Random(f"{name} {number}")
    dtype = DTYPES[(len(name) + number) % 2]
    warmup = "none" if entry.counts else rng.choice(entry.warmup.split())
    # The default ladder is too long to be captured as a whole.
    own_ladder = bool(entry.counts) or (warmup == "none" and rng.random() < 0.2)
    budgets = DEFAULT_LADDER if own_ladder else rng.choice(LADDERS)
    counts = rng.choices(entry.counts, k=4) if entry.counts else _draw_counts(rng, entry, budgets)
    layout = rng.choice(entry.layout.split())
    return Case(
        layout="sequence" if layout == "dense" and rng.random() < 0.05 and not captured else layout,
        place=rng.choice(entry.place.split()) if _keeps_shape(entry) else "after",
        lively=rng.random() < 0.8,
        dtype=dtype,
        warmup=warmup,
        budgets=() if own_ladder else tuple(budgets),
        mode=rng.choice(("auto", "auto", "full", "piecewise")),
        dynamic=rng.choice(("marked",) * 12 + ("all",) * 7 + (() if captured else ("automatic",))),
        inference=rng.random() < 0.2,
        counts=tuple(counts),
        seed=rng.randrange(10**6),
    )


def _draw_counts(rng: random.Random, entry: Entry, budgets: list[int]) -> list[int]:
    """2 to 40 numbers of tokens in any order: they need padding, fill a budget, exceed all, or repeat."""
    near = [b + d for b in budgets if 8 <= b <= 64 for d in (-1, 0, 1)]
    counts: list[int] = []
    for _ in range(rng.choice(_NUM_CALLS)):
        if counts and rng.random() < 0.35:
            counts.append(rng.choice(counts))  # a size that repeats may be captured as it is
        else:
            counts.append(rng.choice((rng.randint(2, 64), rng.randint(2, 20), rng.choice(near))))
    if rng.random() < 0.3:
        counts.append(rng.choice(_LARGE))
    if rng.random() < 0.12:  # a trace of its own, so not always
        counts.append(rng.choice((1, 1, 0)))
    rng.shuffle(counts)
    if counts[0] < 2:
        counts.reverse()
    return [max(entry.least, n // entry.step * entry.step or min(n, 1) * entry.step) for n in counts]


def _keeps_shape(entry: Entry) -> bool:
    """Whether a forward returns a tensor like `x`, so that attention may follow."""
    if entry.layout == "own":
        return False
    forward = entry.make()
    inputs = make_inputs(input_names(forward), max(entry.least, 24), torch.float32, 0, "random")
    shape = inputs["x"].shape
    with torch.no_grad():
        result = forward(**inputs)
    return isinstance(result, Tensor) and result.shape == shape and result.dtype == torch.float32


class Run:
    """One module, compiled and eager, through all calls of a case."""

    def __init__(self, entry: Entry, case: Case) -> None:
        self.entry, self.case = entry, case
        torch.manual_seed(case.seed)
        module = (
            Placed(entry.make(), case.layout, case.place, case.lively).to(case.dtype).requires_grad_(False)
        )
        self.eager = copy.deepcopy(module)
        self.module = module
        options: dict[str, Any] = {"mode": case.mode, "token_budgets": case.budgets}
        dynamic = True if case.dynamic == "all" else None
        self.compiled = torch.compile(module, backend="encoder_cg", dynamic=dynamic, options=options)
        self._known = set(dispatchers())
        self.num_compared = 0
        self._kept: list[tuple[int, Any, Any]] = []

    @property
    def made(self) -> set[BudgetDispatcher]:
        """The dispatchers of the compiled module."""
        return set(dispatchers()) - self._known

    def failure(self) -> str | None:
        """What of the compiled module's is not eager's, or None."""
        with warnings.catch_warnings(), torch.inference_mode() if self.case.inference else torch.no_grad():
            # The backend says so of what reads values on the host, and of gradients.
            warnings.filterwarnings("ignore", "encoder_cg: a graph runs eagerly because it cannot be split")
            self._warm_up()
            for turn, n in enumerate(self.case.counts):
                reason = self._call(turn, n)
                if reason is not None:
                    return f"at {n} tokens, call {turn}: {reason}"
            for n, got, expected in self._kept:
                reason = difference(got, expected, self.entry.tolerance)
                if reason is not None:
                    return f"at {n} tokens, after later calls: {reason}"
        return None

    def _warm_up(self) -> None:
        if self.case.warmup == "none":
            return
        n = next(n for n in self.case.counts if n > 1)
        for module, call in (
            (self.compiled, fx.warmup),
            (self.eager, lambda module, **inputs: module(**inputs)),
        ):
            inputs = self._inputs(n, self.case.seed, self.case.warmup)
            torch.manual_seed(0)
            call(module, **inputs)

    def _call(self, turn: int, n: int) -> str | None:
        seed = self.case.seed + 1 + turn
        inputs, again = (self._inputs(n, seed, "random") for _ in range(2))
        torch.manual_seed(seed)
        try:
            expected = self.eager(**again)
        except (RuntimeError, IndexError, ValueError, AssertionError):
            return None  # for such a number of tokens there is no eager result
        torch.manual_seed(seed)
        got = self.compiled(**inputs)
        self.num_compared += 1
        self._kept.append((n, got, expected))
        return (
            difference(got, expected, self.entry.tolerance)
            or _named("inputs", difference(inputs, again, self.entry.tolerance))
            or _named("state", self._state_difference())
            or _aliases_differ(tensors_in(got), inputs, tensors_in(expected), again)
        )

    def _state_difference(self) -> str | None:
        return difference(
            dict(self.module.state_dict()), dict(self.eager.state_dict()), 10 * self.entry.tolerance
        )

    def _inputs(self, n: int, seed: int, kind: str) -> dict[str, Tensor]:
        inputs = make_inputs(self.module.inputs, n, self.case.dtype, seed, kind)
        if self.case.dynamic == "marked":
            for name, value in inputs.items():
                for dim in INPUTS[name].dims:
                    torch._dynamo.maybe_mark_dynamic(value, dim)
        return inputs


def _named(what: str, reason: str | None) -> str | None:
    return None if reason is None else f"{what}: {reason}"


def _aliases_differ(
    got: list[Tensor], inputs: dict[str, Tensor], expected: list[Tensor], again: dict[str, Tensor]
) -> str | None:
    """Outputs share memory with the inputs that they do in eager, and with no others."""
    for name in inputs:
        for number, (a, b) in enumerate(zip(got, expected, strict=True)):
            if a.numel() and _share(a, inputs[name]) != _share(b, again[name]):
                return f"output {number} shares memory with {name}, or should"
    return None


def _share(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
