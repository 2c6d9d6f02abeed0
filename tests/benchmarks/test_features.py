"""Every registered feature has a row with a user and a stored result, and gains what it costs."""

from __future__ import annotations

from typing import Any

import pytest
from features import Feature, problems, read_features

GAIN: dict[str, Any] = {
    "file": "passes_qwen2_5.json",
    "unit": "ms",
    "value": "256",
    "with": {"candidate": "default"},
    "without": {"candidate": "without pad_mlp_width"},
}
GOOD = Feature("pass", "padding", "wider layers", "a model", GAIN)


def test_the_ledger_has_no_problem() -> None:
    assert [*problems(read_features())] == []


@pytest.mark.parametrize(
    ("feature", "expected"),
    [
        (GOOD, []),
        (GOOD._replace(user=""), ["pass padding: names no user"]),
        (GOOD._replace(result={}), ["pass padding: names no result"]),
        (GOOD._replace(result=GAIN | {"with": GAIN["without"]}), ["pass padding: gains 0.0%"]),
        (GOOD._replace(result=GAIN | {"with": {}}), ["pass padding: passes_qwen2_5.json: expected"]),
        (GOOD._replace(result=GAIN | {"file": "none.json"}), ["pass padding: "]),
        (GOOD._replace(name="another"), ["pass padding: has no row", "pass another: is not registered"]),
    ],
)  # fmt: skip
def test_what_a_row_lacks(feature: Feature, expected: list[str]) -> None:
    found = [*problems([feature], {"pass": {"padding"}})]
    assert len(found) == len(expected)
    assert all(problem.startswith(start) for problem, start in zip(found, expected, strict=True))
