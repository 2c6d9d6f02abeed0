"""`encoder-cg report`: one HTML page of a recorded run, and its tables in the terminal."""

from __future__ import annotations

from pathlib import Path

import jinja2

from fxsplit_encoder import __version__
from fxsplit_encoder.cli.document import Document, mebibytes
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
    percent = "{:.1%}".format
    rows = [
        {
            **vars(use),
            "mode": use.mode or "exact",
            "padding_fraction": use.padding_fraction,
            "share": summary.share(use.cost),
        }
        for use in summary.budgets
    ]
    headers = {"path": "path", "budget": "budget", "mode": "mode", "num_bytes": "MiB", "replays": "replays"}
    headers |= {"tokens": "tokens", "padding_fraction": "padding", "cost": f"cost, {summary.unit}"}
    formats = {"num_bytes": mebibytes, "padding_fraction": percent, "cost": _number, "share": percent}
    document.table("budgets", headers | {"share": "of all"}, rows, formats=formats)
    if summary.misses:
        document.say()
        misses = [
            {"reason": reason, "items": count, "remedy": what_to_do(reason)}
            for reason, count in summary.misses.items()
        ]
        headers = {"reason": "missed as", "items": "items", "remedy": "what helps"}
        document.table("misses", headers, misses)
    document.say()
    places = [
        {"place": place, "cost": cost, "share": summary.share(cost)} for place, cost in summary.places.items()
    ]
    headers = {"place": "where time goes", "cost": f"cost, {summary.unit}", "share": "share"}
    document.table("places", headers, places, formats=formats)
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
    environment.filters.update(number=_number, percent="{:.1%}".format, mib=mebibytes)
    template = environment.get_template(_TEMPLATE)
    return template.render(
        name=name, version=__version__, summary=summary, facts=facts(summary), what_to_do=what_to_do
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2f}"
