"""Every benchmark, by the name of its case, and the tables that are made of what they store.

python benchmarks/bench.py CASE --help
python benchmarks/bench.py CASE --output out/CASE.json
python benchmarks/bench.py tables out/readme.json       # takes results in and writes the documents' tables
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from storage import Record, store_flat
from timing import device_for

CASES: Mapping[str, str] = {
    "encoder": "towers by every way to run them, side by side",
    "requests": "requests of mixed images through one tower",
    "towers": "every tower: error and time against eager, start, memory",
    "attention": "every attention kernel over the segments of vision encoders",
    "products": "every kernel of linear layers over the layers of a vision tower",
    "passes": "what graph passes gain",
    "host": "what a request costs the CPU",
    "backend": "vision models behind torch.compile, by this backend and by torch's own modes",
    "accelerate": "what a model of transformers gains, and its calls cost",
    "connector": "what encoding costs the requests of an engine, beside it and in it",
    "start": "where the seconds of a start go",
    "data_parallel": "a request shared among several GPUs",
    "map_batches": "Ray's map_batches on the GPUs of a host, beside manager.execute alone",
    "serve": "JPEG in, vector out over HTTP, beside a plain server",
    "vllm": "inside vLLM: its classes eagerly, by its manager and by ours",
    "vllm_serving": "vLLM's engine, from prompts with images to tokens",
}
"""By name, which is also that of its module in `cases`: what it measures."""

_WITHOUT_TINY = ("encoder", "attention")
_TABLES = "writes the tables of README.md and docs/ from benchmarks/results"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a case; `run` is what it runs."""
    given = sys.argv[1:] if arguments is None else arguments
    formatter = argparse.RawDescriptionHelpFormatter
    listed = "\n".join(f"  {name:14} {what}" for name, what in (CASES | {"tables": _TABLES}).items())
    parser = argparse.ArgumentParser(description=f"{__doc__}\n{listed}", formatter_class=formatter)
    cases = parser.add_subparsers(dest="case", metavar="CASE", required=True)
    for name in (*CASES, "tables"):
        if name not in given[:1]:  # the others are not imported: some measure imports
            cases.add_parser(name)
            continue
        module = importlib.import_module("tables" if name == "tables" else f"cases.{name}")
        case = cases.add_parser(name, description=module.__doc__, formatter_class=formatter)
        if name in CASES:
            case.add_argument("--output", type=Path, metavar="JSON", help="file for the results")
        if name in CASES and name not in _WITHOUT_TINY:
            case.add_argument("--tiny", action="store_true", help="small sizes, on a CPU too")
        module.add_arguments(case)
        case.set_defaults(run=module.run if name == "tables" else functools.partial(_run, name))
    return parser.parse_args(given)


def _run(name: str, arguments: argparse.Namespace) -> int:
    """Runs a case and prints its table; 1 if a row failed, but one of a kernel, whose failure is a result."""
    if name != "encoder":  # which has a floor, and something to compare, without a GPU too
        arguments.device = device_for(name, getattr(arguments, "tiny", False))
    record = Record(name, arguments.output)
    importlib.import_module(f"cases.{name}").run(arguments, record)
    if arguments.output is not None:
        store_flat(arguments.output.with_suffix(".csv"), record.rows)
    print(getattr(importlib.import_module("tables"), name)(record.result))
    failures = [row for row in record.rows if "failure" in row]
    for row in failures:
        print("failed:", *(f"{name}={value}" for name, value in row.items()), file=sys.stderr)
    return int(name not in ("attention", "products") and bool(failures))


def main() -> int:
    arguments = parse()
    status: int = arguments.run(arguments) or 0
    return status


if __name__ == "__main__":
    sys.exit(main())
