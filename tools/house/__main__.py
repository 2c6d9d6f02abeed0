"""`make house`: prints every measure with its goal; `--verbose` also lists what was counted."""

from __future__ import annotations

import argparse

from house.measure import ABOUT, Measure
from house.table import measure_all, table


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="house", description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="list what each figure counts")
    return parser.parse_args()


def _list(measure: Measure) -> None:
    if measure.items:
        print(f"\n{measure.name}: {measure.value}")
        for item in measure.items:
            print(f"  {item}")


def main() -> None:
    """Measures and prints."""
    is_verbose = _parse().verbose
    measures = measure_all()
    print(table(measures))
    print(f'\n"about": reached up to {ABOUT - 1:.0%} above')
    if is_verbose:
        for measure in measures:
            _list(measure)


if __name__ == "__main__":
    main()
