"""Which rows Inductor keeps in registers, and that its cache knows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
from torch import fx
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.codecache import compiled_fx_graph_hash
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

from fxsplit_encoder._torch import inductor
from fxsplit_encoder._torch.inductor import LONGEST_ROW, persistent_rows

TOKENS = sympy.Symbol("s0", integer=True, positive=True)


@pytest.fixture(autouse=True)
def graph() -> Iterator[None]:
    """What Inductor asks about sizes while it lowers a graph."""
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):  # type: ignore[arg-type]
        yield


def is_persistent(
    width: Any,
    hint: ReductionHint = ReductionHint.INNER,
    cooperative: bool = False,
    ordered: int | None = None,
) -> bool:
    features = SimpleNamespace(
        reduction_numel=sympy.sympify(width),
        numel=sympy.Integer(7056),
        get_reduction_hint=lambda: hint,
        # Asked since torch 2.14: in blocks of how many entries a row has to be reduced.
        **dict.fromkeys(("strict_sum_rblock", "strict_reduction_rblock"), lambda: ordered),
        **dict.fromkeys(
            ("has_strict_sum_multirow_reduction", "has_strict_multirow_reduction"), lambda: False
        ),
    )
    return V.choices.should_use_persistent_reduction(features, cooperative)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("width", "before", "within"),
    [
        (768, True, True),
        (1024, True, True),
        (1152, False, True),
        (LONGEST_ROW, False, True),
        (LONGEST_ROW + 1, False, False),
        (TOKENS, False, False),
    ],
    ids=str,
)
def test_the_rows_of_vision_towers_stay_in_registers(width: Any, before: bool, within: bool) -> None:
    assert is_persistent(width) == before
    with persistent_rows():
        assert is_persistent(width) == within
    assert is_persistent(width) == before


def test_what_is_no_row_and_what_is_switched_off_stays_inductors_choice() -> None:
    with persistent_rows():
        assert not is_persistent(1152, ReductionHint.OUTER)
        assert not is_persistent(1152, cooperative=True)
        assert not is_persistent(1152, ordered=256)
        with config.patch({"triton.persistent_reductions": False}):
            assert not is_persistent(1152)


def test_the_cache_tells_graphs_with_and_without_apart() -> None:
    module = fx.symbolic_trace(lambda x: x + 1)

    def key() -> str:
        return compiled_fx_graph_hash(module, [], {}, [])[0]  # type: ignore[typeddict-item]

    without = key()
    with persistent_rows():
        within = key()
    with persistent_rows():
        assert key() == within
    assert key() == without != within


def test_choices_of_the_caller_stay() -> None:
    class Own(InductorChoices):
        pass

    with V.set_choices_handler(Own()), persistent_rows():
        assert type(V.choices) is Own
        assert config.inductor_choices_class is None
    with config.patch(inductor_choices_class=Own), persistent_rows():
        assert config.inductor_choices_class is Own


@pytest.mark.parametrize("pools", [0, 1])
def test_workers_that_were_started_are_asked_at_once_whether_they_are_ready(
    pools: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are none, as without Triton, asking would start them."""
    log: list[str] = []
    process_pool = SimpleNamespace(cache_info=lambda: SimpleNamespace(currsize=pools))
    asked = SimpleNamespace(process_pool=process_pool, use_process_pool=lambda: log.append("asked"))
    monkeypatch.setattr(inductor, "AsyncCompile", asked)
    monkeypatch.setattr(inductor, "maybe_warm_pool", lambda: log.append("started"))
    inductor.start_workers.__wrapped__()
    assert log == ["started", "asked"][: 1 + pools]
