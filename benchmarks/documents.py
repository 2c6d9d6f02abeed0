"""Writes every marked table of README.md and docs/ anew, from what is stored in benchmarks/results.

    python benchmarks/documents.py

Store new results there first. A table without figures says that it has not been measured; how marks look is
told in `tables/marks.py`. A test fails where a table is not what is stored.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from storage import RESULTS
from tables import (
    attention,
    biased_attention,
    data_parallel,
    encoder,
    host_time,
    kernel_times,
    mixed_requests,
    passes,
    startup,
    towers,
)
from tables.marks import Source, fill

ROOT = Path(__file__).resolve().parents[1]
_ENCODER = "encoder_h200.json"
_KERNEL_TIMES = "kernel_times_h200.json"

TABLES: Mapping[str, Source] = {
    "attention.py: kernels": Source("attention_h200.json", attention.marked),
    "biased_attention.py: ways": Source("biased_attention_h200.json", biased_attention.marked),
    "data_parallel.py: ranks": Source("data_parallel_h200.json", data_parallel.ranks),
    "encoder.py: all": Source(_ENCODER, encoder.marked(encoder.all_rows)),
    "encoder.py: hardware": Source(_ENCODER, encoder.marked_hardware),
    "encoder.py: images": Source(_ENCODER, encoder.marked(encoder.images, "Milliseconds, medians.")),
    "encoder.py: modes": Source(
        "encoder_modes_h200.json", encoder.marked(encoder.modes, "Milliseconds, medians.")
    ),
    "encoder.py: starts": Source(_ENCODER, encoder.marked(encoder.starts)),
    "encoder.py: summary": Source(_ENCODER, encoder.marked(encoder.summary)),
    "host_time.py: host": Source("host_time_h200.json", host_time.marked),
    "kernel_times.py: kinds": Source(_KERNEL_TIMES, kernel_times.marked_kinds),
    "kernel_times.py: largest": Source(_KERNEL_TIMES, kernel_times.marked_largest),
    "mixed_requests.py: requests": Source("mixed_requests_h200.json", mixed_requests.requests),
    "passes.py: products": Source("passes_h200.json", passes.marked_products),
    "passes.py: replays": Source("passes_h200.json", passes.marked_replays),
    "startup.py: phases": Source("startup_h200.json", startup.marked),
    "towers.py: figures": Source("towers_h200.json", towers.marked),
}
"""By mark: the results that a table is made of."""


def documents() -> list[Path]:
    """Everything that may hold marked tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def written_anew(document: Path) -> str:
    """The text of a document, its tables as the stored results give them."""
    return fill(document.read_text(encoding="utf-8"), TABLES, RESULTS)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    for document in documents():
        text = written_anew(document)
        if text != document.read_text(encoding="utf-8"):
            document.write_text(text, encoding="utf-8")
            print(f"{document.relative_to(ROOT)}: written anew")


if __name__ == "__main__":
    main()
