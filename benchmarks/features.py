"""The ledger of features: for each what it is for, who needs it, and what a stored result shows.

What has no stored result, no user, or less than 2 % of gain where a row without the feature was measured does
not stay. Rows are data in features.toml; figures are read from benchmarks/results, never typed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from storage import RESULTS, load

from fxsplit_encoder.compile.passes import PASSES
from fxsplit_encoder.config import Mode, Packing
from fxsplit_encoder.kernels.attention import KERNELS as ATTENTION_KERNELS
from fxsplit_encoder.kernels.products.measured import KERNELS as PRODUCT_KERNELS

LEDGER = Path(__file__).with_name("features.toml")
LEAST_GAIN = 0.02

REGISTERED: Mapping[str, frozenset[str]] = {
    "pass": frozenset(PASSES),
    "attention kernel": frozenset(kernel.name for kernel in ATTENTION_KERNELS) - {"per_segment"},
    "product kernel": frozenset(kernel.name for kernel in PRODUCT_KERNELS),
    "mode": frozenset(get_args(Mode)),
    "packing": frozenset(get_args(Packing)),
}
"""By kind the features that the package registers, each of which has to have a row. The attention kernel
`per_segment`, with which others are compared, runs on no GPU."""


class Feature(NamedTuple):
    """A row of the ledger."""

    kind: str
    name: str
    purpose: str
    user: str
    result: Mapping[str, Any]

    def values(self) -> list[float]:
        """The stored value with the feature, and the one without it if there is one.

        Raises:
            ValueError: the result has no such row, or several, or no such value.
        """
        rows = load(RESULTS / self.result["file"])["rows"]
        wanted = [self.result[name] for name in ("with", "without") if name in self.result]
        return [self._value(rows, each) for each in wanted]

    def _value(self, rows: Iterable[Mapping[str, Any]], where: Mapping[str, Any]) -> float:
        found = [row for row in rows if all(row.get(key) == value for key, value in where.items())]
        value = found[0].get(self.result["value"]) if len(found) == 1 else None
        if not isinstance(value, int | float):
            raise ValueError(
                f"{self.result['file']}: expected one row of {dict(where)} with {self.result['value']!r}; "
                f"got {len(found)} rows and {value}"
            )
        return float(value)


def read_features(path: Path = LEDGER) -> list[Feature]:
    """All rows of the ledger but those of what left."""
    kinds = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Feature(kind, name, row.get("for", ""), row.get("user", ""), row.get("result", {}))
        for kind, rows in kinds.items()
        if kind != "lost"
        for name, row in rows.items()
    ]


def read_lost(path: Path = LEDGER) -> Mapping[str, str]:
    """What was tried and is not in the package, and what was found."""
    lost: Mapping[str, str] = tomllib.loads(path.read_text(encoding="utf-8"))["lost"]
    return lost


def problems(
    features: Iterable[Feature], registered: Mapping[str, Iterable[str]] = REGISTERED
) -> Iterator[str]:
    """Rows that do not earn their place, registered features without a row, and rows of what is gone."""
    rows = {(each.kind, each.name): each for each in features}
    for kind, names in registered.items():
        listed = {name for its_kind, name in rows if its_kind == kind}
        yield from (f"{kind} {name}: has no row" for name in sorted(set(names) - listed))
        yield from (f"{kind} {name}: is not registered" for name in sorted(listed - set(names)))
    for (kind, name), feature in rows.items():
        for what, given in (("purpose", feature.purpose), ("user", feature.user), ("result", feature.result)):
            if not given:
                yield f"{kind} {name}: names no {what}"
        if not feature.result:
            continue
        try:
            with_it, *without = feature.values()
        except (OSError, ValueError, KeyError) as error:
            yield f"{kind} {name}: {error}"
            continue
        if without and (gain := without[0] / with_it - 1) < LEAST_GAIN:
            yield f"{kind} {name}: gains {gain:.1%}; expected at least {LEAST_GAIN:.0%}"
