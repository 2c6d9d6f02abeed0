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

from .entries import Entry, input_names
from .inputs import INPUTS, make_inputs
from .placing import Placed

DTYPES = (torch.float32, torch.bfloat16)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float64: 1e-12, torch.complex64: 1e-5}
"""Relative to the largest entry of a column: with one scale for all, a loud one would hide the others."""
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


def draw(name: str, entry: Entry, number: int) -> Case:
    """A case for an entry, the same one for the same name and number; the dtypes take turns."""
    rng = random.Random(f"{name} {number}")
    dtype = DTYPES[(len(name) + number) % 2]
    warmup = rng.choice(entry.warmup.split())
    # The default ladder is too long to be captured as a whole.
    own_ladder = warmup == "none" and rng.random() < 0.2
    budgets = DEFAULT_LADDER if own_ladder else rng.choice(LADDERS)
    counts = _draw_counts(rng, entry, budgets)
    layout = rng.choice(entry.layout.split())
    return Case(
        layout="sequence" if layout == "dense" and rng.random() < 0.05 else layout,
        place=rng.choice(entry.place.split()) if _keeps_shape(entry) else "after",
        lively=rng.random() < 0.8,
        dtype=dtype,
        warmup=warmup,
        budgets=() if own_ladder else tuple(budgets),
        mode=rng.choice(("auto", "auto", "full", "piecewise")),
        dynamic=rng.choice(("marked",) * 12 + ("all",) * 7 + ("automatic",)),
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
    return [max(entry.least, n) for n in counts]


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
        self.case = case
        torch.manual_seed(case.seed)
        module = (
            Placed(entry.make(), case.layout, case.place, case.lively).to(case.dtype).requires_grad_(False)
        )
        self.eager = copy.deepcopy(module)
        self.module = module
        options: dict[str, Any] = {"mode": case.mode, "token_budgets": case.budgets}
        dynamic = True if case.dynamic == "all" else None
        self.compiled = torch.compile(module, backend="encoder_cg", dynamic=dynamic, options=options)
        self.num_compared = 0

    def check(self) -> None:
        """Compares all calls with eager's, and again their results after the last call."""
        with warnings.catch_warnings(), torch.inference_mode() if self.case.inference else torch.no_grad():
            # The backend says so of what reads values on the host, and of gradients.
            warnings.filterwarnings("ignore", "encoder_cg: a graph runs eagerly because it cannot be split")
            if self.case.warmup != "none":
                self._warm_up()
            kept = [self._compared(self.case.seed + turn, n) for turn, n in enumerate(self.case.counts, 1)]
            for got, expected in kept:
                assert_same(got, expected)

    def _warm_up(self) -> None:
        n = next(n for n in self.case.counts if n > 1)
        for module, call in (
            (self.compiled, fx.warmup),
            (self.eager, lambda module, **inputs: module(**inputs)),
        ):
            inputs = self._inputs(n, self.case.seed, self.case.warmup)
            torch.manual_seed(0)
            call(module, **inputs)

    def _compared(self, seed: int, n: int) -> tuple[Any, Any]:
        """The results of both, which are equal as are inputs, state and shared memory."""
        inputs, again = (self._inputs(n, seed, "random") for _ in range(2))
        torch.manual_seed(seed)
        try:
            expected = self.eager(**again)
        except (RuntimeError, IndexError, ValueError, AssertionError):
            return None, None  # for such a number of tokens there is no eager result
        torch.manual_seed(seed)
        got = self.compiled(**inputs)
        self.num_compared += 1
        assert_same(got, expected)
        assert_same(inputs, again)
        states = (dict(module.state_dict()) for module in (self.module, self.eager))
        assert_same(*states, tolerance=10)
        assert _shared(got, inputs) == _shared(expected, again), "results share other memory with inputs"
        return got, expected

    def _inputs(self, n: int, seed: int, kind: str) -> dict[str, Tensor]:
        inputs = make_inputs(self.module.inputs, n, self.case.dtype, seed, kind)
        if self.case.dynamic == "marked":
            for name, value in inputs.items():
                for dim in INPUTS[name].dims:
                    torch._dynamo.maybe_mark_dynamic(value, dim)
        return inputs


def _shared(results: Any, inputs: dict[str, Tensor]) -> list[tuple[int, str]]:
    """Which results lie in the memory of which inputs."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
    return [
        (number, name)
        for number, tensor in enumerate(tensors)
        for name, given in inputs.items()
        if tensor.numel() and tensor.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    ]


def assert_same(got: Any, expected: Any, tolerance: int = 1) -> None:
    """Structures of tensors and others; floats may differ by so many times `ROUNDING`."""
    ours, spec = torch.utils._pytree.tree_flatten(got)
    theirs, expected_spec = torch.utils._pytree.tree_flatten(expected)
    assert spec == expected_spec
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b)
        if not isinstance(b, Tensor):
            assert a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if b.dtype not in ROUNDING:
            assert torch.equal(a, b)
        elif not torch.equal(a, b):
            wide = b.to(torch.complex128 if b.is_complex() else torch.float64)
            sizes = wide.abs().nan_to_num(posinf=0).reshape(-1, b.shape[-1] if b.dim() > 1 else 1)
            allowed = tolerance * ROUNDING[b.dtype] * sizes.amax(0) + 1e-9
            torch.testing.assert_close(a.to(wide) / allowed, wide / allowed, rtol=0, atol=1, equal_nan=True)
