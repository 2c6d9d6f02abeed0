"""`encoder-cg report`: which budgets of a recorded run served, what missed and why, and where the time went.

Tables in the terminal, and one HTML page.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2

from fxsplit_encoder import __version__
from fxsplit_encoder.cli.document import Document, mebibytes
from fxsplit_encoder.tuning.trace import (
    RecordedRun,
    RunRecord,
    ServedBatch,
    ServedPath,
    TracedRequest,
    read_run,
)

IN_REPLAYS, IN_PADDING = "replays, for items", "replays, for padding"
AT_EXACT_SHAPE, EAGERLY = "compiled, at the exact shape", "eager"
PLACES = (IN_REPLAYS, IN_PADDING, AT_EXACT_SHAPE, EAGERLY)


@dataclass
class BudgetUse:
    """Counts of one captured budget of a path."""

    path: str
    budget: int
    mode: str = ""
    """Empty: at the exact size of a token count that recurred."""
    num_bytes: int | None = None
    replays: int = 0
    tokens: int = 0
    """Output tokens of items, over all replays."""
    cost: float = 0.0
    """Of all replays, in the run's unit."""

    @property
    def padding_fraction(self) -> float:
        """The share of padding in what was replayed; 0.0 before the first replay."""
        return 1 - self.tokens / (self.budget * self.replays) if self.replays else 0.0


@dataclass(frozen=True)
class RunSummary:
    """The figures of a recorded run."""

    run: RunRecord
    """What served last."""
    num_runs: int
    """How often the captures changed, the first included."""
    unit: str
    """Of costs: "ms", predicted from measurements, or output "tokens"."""
    requests: int
    items: int
    misses: Mapping[str, int]
    """Items that fell back on some path, by reason, most first."""
    budgets: tuple[BudgetUse, ...]
    places: Mapping[str, float]
    """Costs by where they arose, of `PLACES`."""
    host_ms: Mapping[str, float]
    """Milliseconds that a call kept its thread: "median", "p90" and "total"."""

    @property
    def hit_fraction(self) -> float:
        """The share of items that replays alone served."""
        return 1 - sum(self.misses.values()) / self.items if self.items else 0.0

    @property
    def padding_fraction(self) -> float:
        """The share of padding in the tokens of all replays."""
        replayed = sum(use.budget * use.replays for use in self.budgets)
        return 1 - sum(use.tokens for use in self.budgets) / replayed if replayed else 0.0

    @property
    def cost(self) -> float:
        """All costs, in `unit`."""
        return sum(self.places.values())

    def share(self, cost: float) -> float:
        """The share of all costs that `cost` is."""
        return cost / self.cost if self.cost else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values that JSON can hold."""
        budgets = [{**asdict(use), "padding_fraction": use.padding_fraction} for use in self.budgets]
        fractions = {"hit_fraction": self.hit_fraction, "padding_fraction": self.padding_fraction}
        run = self.run.model_dump(mode="json")
        return {**asdict(self), **fractions, "budgets": budgets, "advice": list(advice(self)), "run": run}


def summarize(recorded: RecordedRun) -> RunSummary:
    """The figures of a recorded run. Where captures changed in between, budgets are those of all of them."""
    unit, cost_of = _pricing(recorded)
    uses = {
        (name, capture.budget): BudgetUse(name, capture.budget, capture.mode, capture.num_bytes)
        for run in recorded.runs
        for name, path in run.paths.items()
        for capture in path.captures
    }
    places = dict.fromkeys(PLACES, 0.0)
    misses: Counter[str] = Counter()
    for batch in _batches(recorded):
        served = {name: path for name, path in batch.paths.items() if path.result != "skipped"}
        if missed := [path.result for path in served.values() if path.result != "hit"]:
            misses[missed[0]] += len(batch.items)
        for name, path in served.items():
            cost = cost_of(name, path)
            if not path.budget:
                places[EAGERLY if path.eager else AT_EXACT_SHAPE] += cost
                continue
            use = uses.setdefault((name, path.budget), BudgetUse(name, path.budget))
            use.replays += 1
            use.tokens += path.tokens
            use.cost += cost
            share = path.tokens / path.budget
            places[IN_REPLAYS] += cost * share
            places[IN_PADDING] += cost * (1 - share)
    return RunSummary(
        recorded.runs[-1],
        len(recorded.runs),
        unit,
        len(recorded.requests),
        sum(len(request.items) for request in recorded.requests),
        dict(misses.most_common()),
        tuple(uses[key] for key in sorted(uses)),
        places,
        _host(recorded.requests),
    )


def _batches(recorded: RecordedRun) -> list[ServedBatch]:
    return [batch for request in recorded.requests for batch in request.batches]


def _pricing(recorded: RecordedRun) -> tuple[str, Callable[[str, ServedPath], float]]:
    """The unit of costs, milliseconds where all of them are known, else output tokens; and what a served path
    cost.
    """
    curves = {
        name: path.costs.curves()
        for run in recorded.runs
        for name, path in run.paths.items()
        if path.costs is not None
    }

    def milliseconds(name: str, path: ServedPath) -> float:
        if path.milliseconds is not None:
            return path.milliseconds
        costs = curves[name]
        return costs.replay.at(path.budget) if path.budget else costs.exact.at(path.tokens)

    is_known = all(
        path.result == "skipped" or path.milliseconds is not None or name in curves
        for batch in _batches(recorded)
        for name, path in batch.paths.items()
    )
    if is_known and curves:
        return "ms", milliseconds
    return "tokens", lambda name, path: float(path.budget or path.tokens)


def _host(requests: Sequence[TracedRequest]) -> dict[str, float]:
    times = sorted(request.host_ms for request in requests)
    p90 = times[math.ceil(0.9 * len(times)) - 1]
    return {"median": statistics.median(times), "p90": p90, "total": sum(times)}


# --- what to do

_MUCH = 0.1
WHAT_TO_DO = {
    "over_largest_budget": "add a larger budget, or let `encoder-cg tune` choose",
    "too_many_frames": "raise max_frames_per_batch",
    "too_many_segments": "raise max_items_per_batch or max_frames_per_batch",
    "not_captured": "call capture() before the first request; notes say which budgets were dropped",
    "disabled": "captures are switched off by `enabled: false` or `mode: none`",
    "exact_is_faster": "nothing: the exact shape was measured to be as fast",
    "eager_is_faster": "nothing: the eager forward was measured to be faster",
    "unsupported_input": "the tower captures nothing for these inputs",
    "extent_exceeded": "raise max_items_per_batch or max_frames_per_batch",
    "padding_unproved": "see `encoder-cg inspect`: it names the line of code that mixes rows",
    "unsupported_graph": "see `encoder-cg inspect`: it draws random numbers or has sizes that depend on data",
    "options": "leave out arguments that change what the tower returns, such as output_hidden_states=True",
    "gradients": "call it under torch.no_grad() or torch.inference_mode()",
    "training": "call eval() of the tower",
    "autocast": "load the model in the dtype wanted instead of autocast",
    "foreign_code": "remove hooks and custom attention from the tower",
    "offloaded": "keep the whole tower on one GPU",
    "outer_trace": "let nothing else compile or trace the tower",
    "uncaptured_output": "read what captures make, such as last_hidden_state; all else costs a second run",
    "new_shape": "nothing, if sizes recur: with `mode: exact` a size is captured once it has come often",
}


def advice(summary: RunSummary) -> Iterator[str]:
    """Yields advice about large shares of misses and padding."""
    for reason, count in summary.misses.items():
        if count >= _MUCH * summary.items:
            share, remedy = count / summary.items, WHAT_TO_DO.get(reason, "")
            yield f"{share:.0%} of the items missed as {reason}: {remedy}."
    share = summary.share(summary.places[IN_PADDING])
    if share >= _MUCH:
        yield f"{share:.0%} of the work is padding: `encoder-cg tune` finds budgets for this trace."
    unused = [use for use in summary.budgets if use.mode and not use.replays]
    if unused:
        held = sum(use.num_bytes or 0 for use in unused) / 2**20
        yield f"{len(unused)} of {len(summary.budgets)} budgets served nothing ({held:.1f} MiB)."


# --- tables and the page


def run_report(trace: Path, output: Path, document: Document) -> None:
    """Reads a recorded run, shows its figures, and writes the page. InputError: it holds none."""
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
    headers = {"num_bytes": "MiB", "padding_fraction": "padding", "cost": f"cost, {summary.unit}"}
    formats = {"num_bytes": mebibytes, "padding_fraction": percent, "cost": _number, "share": percent}
    document.table("budgets", rows, headers, formats)
    if summary.misses:
        document.say()
        misses = [
            {"reason": reason, "items": count, "remedy": WHAT_TO_DO.get(reason, "")}
            for reason, count in summary.misses.items()
        ]
        document.table("misses", misses, {"reason": "missed as", "remedy": "what helps"})
    document.say()
    places = [
        {"place": place, "cost": cost, "share": summary.share(cost)} for place, cost in summary.places.items()
    ]
    document.table("places", places, {**headers, "place": "where time goes"}, formats)
    document.say()
    for line in advice(summary):
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
    return environment.get_template("report.html.jinja").render(
        name=name,
        version=__version__,
        summary=summary,
        facts=facts(summary),
        advice=advice(summary),
        what_to_do=WHAT_TO_DO,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2f}"
