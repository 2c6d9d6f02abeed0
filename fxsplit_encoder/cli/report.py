"""`encoder-cg report`: one HTML page of a recorded run, and its tables in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from fxsplit_encoder import __version__
from fxsplit_encoder.cli.document import Column, Document, columns
from fxsplit_encoder.tuning.summary import RunSummary, summarize, what_to_do
from fxsplit_encoder.tuning.trace import read_run

_TEMPLATE = "report.html.jinja"


def run_report(trace: Path, output: Path, document: Document) -> None:
    """Read a recorded run, say what it comes to, and write the page.

    Raises:
        InputError: the trace holds no recorded run.
    """
    summary = summarize(read_run(trace))
    output.write_text(render(summary, trace.name), encoding="utf-8")
    document.content["summary"] = summary.as_dict()
    document.facts(facts(summary))
    document.say()
    _say_budgets(summary, document)
    if summary.misses:
        document.say()
        rows = [[reason, count, what_to_do(reason)] for reason, count in summary.misses.items()]
        document.table("misses", columns(reason="missed as", items="items", remedy="what helps"), rows)
    document.say()
    costs = Column("cost", f"cost, {summary.unit}", _number)
    share = Column("share", "share", "{:.1%}".format)
    document.table("places", [*columns(place="where time goes"), costs, share], _shares(summary))
    document.say()
    for line in summary.advice:
        document.say(line)
    document.put("file", str(output), f"wrote {output}")


def facts(summary: RunSummary) -> dict[str, str]:
    """The run in a few lines."""
    run, host = summary.run, summary.host_ms
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    hits = f"{summary.hit_fraction:.1%} hit, {summary.padding_fraction:.1%} of what was replayed is padding"
    return {
        "tower": f"{run.tower}, {run.dtype}, on {run.device}",
        "versions": versions,
        "requests": f"{summary.requests}, {summary.items} items: {hits}",
        "calls": f"kept the CPU {host['median']:.2f} ms each (median; p90 {host['p90']:.2f})",
    }


def render(summary: RunSummary, name: str) -> str:
    """The page, in one file that needs no other."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fxsplit_encoder.cli", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=_number, percent="{:.1%}".format, mib=_mebibytes)
    largest = max((count for *_, count in summary.sizes), default=0)
    return environment.get_template(_TEMPLATE).render(
        name=name,
        version=__version__,
        summary=summary,
        facts=facts(summary),
        shares=_shares(summary),
        total=sum(summary.places.values()),
        most_in_a_range=largest,
        what_to_do=what_to_do,
    )


def _say_budgets(summary: RunSummary, document: Document) -> None:
    total = sum(summary.places.values())
    rows: list[list[Any]] = [
        [
            *(use.path, use.budget, use.mode or "exact", use.num_bytes, use.replays, use.tokens),
            *(use.padding_fraction, use.cost, use.cost / total if total else 0.0),
        ]
        for use in summary.budgets
    ]
    headers = [
        *columns(path="path", budget="budget", mode="mode"),
        Column("num_bytes", "MiB", _mebibytes),
        *columns(replays="replays", tokens="tokens"),
        Column("padding_fraction", "padding", "{:.1%}".format),
        Column("cost", f"cost, {summary.unit}", _number),
        Column("share", "of all", "{:.1%}".format),
    ]
    document.table("budgets", headers, rows)


def _shares(summary: RunSummary) -> list[tuple[str, float, float]]:
    """Where time goes: the place, the cost and its share."""
    total = sum(summary.places.values())
    return [(place, cost, cost / total if total else 0.0) for place, cost in summary.places.items()]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2f}"


def _mebibytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:.1f}"
