"""A thousand random graphs: what is proved may be padded, and something is proved of every operation.

`FUZZER_GRAPHS=50000 pytest -m "" tests/compile/padding/test_fuzzer.py` runs more of them.
"""

import os
from collections.abc import Callable

import pytest

from fxsplit_encoder.compile.padding.rules import RULES
from fxsplit_encoder.compile.padding.states import NodeView, Rows, State

from .fuzzing.calls import POINTWISE
from .fuzzing.campaign import FOCUSES, run_seed, seeds_around

_GRAPHS = int(os.environ.get("FUZZER_GRAPHS", "1000"))
_CHUNKS = 20
_QUICK_CHUNKS = 2
_EACH = -(-_GRAPHS // len(FOCUSES))
_UNTIL_PROVED = 40


def _names(chunk: int) -> tuple[str, ...]:
    return FOCUSES[chunk::_CHUNKS]


def test_no_call_is_missed() -> None:
    assert len(POINTWISE) > 150
    assert sum(len(_names(chunk)) for chunk in range(_CHUNKS)) * _EACH >= _GRAPHS


# The first graphs call every operation that has a rule, but for some interpolations.
@pytest.mark.parametrize(
    "chunk",
    [pytest.param(n, marks=pytest.mark.exhaustive) if n >= _QUICK_CHUNKS else n for n in range(_CHUNKS)],
)
def test_what_is_proved_may_be_padded(chunk: int) -> None:
    generated: set[str] = set()
    accepted: set[str] = set()
    for seed in (seed for name in _names(chunk) for seed in seeds_around(name, _EACH)):
        outcome = run_seed(seed)
        assert not outcome.wrong, f"seed {seed}: {outcome.wrong}"
        generated |= outcome.operations
        accepted |= outcome.accepted
    assert generated.issuperset(_names(chunk))
    never = [name for name in _names(chunk) if name not in accepted and not _is_ever_proved(name)]
    assert not never


def _is_ever_proved(name: str) -> bool:
    return any(name in run_seed(seed).accepted for seed in seeds_around(name, _UNTIL_PROVED)[_EACH:])


def _rows_whatever(view: NodeView) -> State:
    """What a wrong rule says: the tokens' dimension stays what it was."""
    return view.each_result(Rows(view.rows()))


def _first_rows(view: NodeView) -> State:
    """A wrong rule for operations on several tensors."""
    return Rows(next(s.dim for s in map(view.state, view.arg(0)) if isinstance(s, Rows)))


@pytest.mark.parametrize(
    ("name", "wrong_rule"),
    [
        ("_softmax", _rows_whatever),
        ("flip", _rows_whatever),
        ("roll", _rows_whatever),
        ("constant_pad_nd", _rows_whatever),
        ("embedding", lambda view: Rows(view.rows(1))),
        ("index_select", lambda view: Rows(view.rows(2))),
        ("cat", _first_rows),
    ],
)
def test_a_wrong_rule_is_found(
    name: str, wrong_rule: Callable[[NodeView], State], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, name, wrong_rule)
    assert any(name in run_seed(seed).wrong for seed in seeds_around(name, 60))
