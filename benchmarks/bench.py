"""Every benchmark, by the name of its case.

python benchmarks/bench.py CASE --help
python benchmarks/bench.py CASE --output out/CASE.json
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CASES: Mapping[str, str] = {
    "ab": "two commits side by side on one device",
}
"""By name, which is also that of its module: what it measures."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a case, and the case's module as `module`."""
    given = sys.argv[1:] if arguments is None else arguments
    formatter = argparse.RawDescriptionHelpFormatter
    listed = "\n".join(f"  {name:14} {what}" for name, what in CASES.items())
    parser = argparse.ArgumentParser(description=f"{__doc__}\n{listed}", formatter_class=formatter)
    cases = parser.add_subparsers(dest="case", metavar="CASE", required=True)
    for name, what in CASES.items():
        if name in given[:1]:  # the others are not imported: some cases set up their process first
            module = importlib.import_module(name)
            case = cases.add_parser(name, help=what, description=module.__doc__, formatter_class=formatter)
            case.add_argument("--output", type=Path, metavar="JSON", help="file for the results")
            module.add_arguments(case)
            case.set_defaults(module=module)
        else:
            cases.add_parser(name, help=what)
    return parser.parse_args(given)


def main() -> int:
    arguments = parse()
    status: int = arguments.module.run(arguments) or 0
    return status


if __name__ == "__main__":
    sys.exit(main())
