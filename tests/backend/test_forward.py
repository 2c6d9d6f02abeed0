"""What budgets have room for."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import fxsplit_encoder as fx
from fxsplit_encoder.backend.call_program import ProgramBudgets

from ..small_tower import FEATURES, SmallAdapter

ratios = st.one_of(st.integers(1, 16), st.integers(1, 300).map(lambda tokens: Fraction(1, tokens)))


def budgets(rows_per_token: int | Fraction, factors: dict[int, int], max_items: int) -> ProgramBudgets:
    return ProgramBudgets((512,), rows_per_token, factors, max_items)


@given(ratios, st.integers(1, 5000))
def test_a_budget_holds_the_rows_of_its_tokens_and_no_more(ratio: int | Fraction, tokens: int) -> None:
    known = budgets(ratio, {}, 0)
    assert known.rows(tokens) == math.floor(tokens * ratio)
    for rows in (known.rows(tokens), known.rows(tokens) + 1):
        assert (known.tokens_of(rows) <= tokens) == (rows <= tokens * ratio)


def test_segments_of_images_are_limited_and_those_for_windows_are_not() -> None:
    limited = budgets(4, {3: 1, 5: 4}, 8)
    assert [limited.segment_factor(slot) for slot in (3, 9, 5)] == [1, 1, 4]  # no host op made 9
    assert limited.segments_held(3, 512) == limited.segments_held(9, 512)
    unlimited = budgets(4, {3: 1, 5: 4}, 0)
    assert limited.segments_held(3, 512) < unlimited.segments_held(3, 512)
    assert limited.segments_held(5, 512) == unlimited.segments_held(5, 512) == 16


@torch.no_grad()
def test_a_towers_default_ladder_is_the_managers(made: Any) -> None:
    tower = SmallAdapter()
    config = fx.EncoderConfig(max_items_per_batch=7)
    (listed,) = fx.EncoderCudaGraphManager(tower, config).limits.path_budgets.values()
    compiled = torch.compile(tower, backend="encoder_cg", options={"config": config})
    compiled(torch.randn(16, FEATURES), torch.tensor([[1, 4, 4]]))
    (dispatcher,) = made()
    assert dispatcher.known_budgets is not None
    assert dispatcher.known_budgets.tokens == listed
