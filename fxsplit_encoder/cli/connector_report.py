"""`encoder-cg report` of a run that a `Connector` recorded: its statistics, and the slowest requests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from fxsplit_encoder.cli.document import Column, Document, columns
from fxsplit_encoder.connector.run_log import RecordedRun, read_run
from fxsplit_encoder.connector.statistics import Durations
from fxsplit_encoder.errors import InputError

_SLOWEST = 5
_STAGES = {
    "prepare": "hash, decode, preprocess",
    "queue": "wait for a worker",
    "encode": "in a batch",
    "ready": "from submission to ready",
}


def run_connector_report(path: Path, document: Document) -> None:
    """Read a connector's run and say what it comes to.

    Raises:
        InputError: the file holds no run, or nothing of one.
    """
    run = read_run(path)
    if not run.tickets and run.stats is None:
        raise InputError(f"{path}: expected at least one ticket; got none")
    _say_tickets(run, document)
    if run.stats is None:
        document.notes(["the run did not end by itself: there are no statistics but its tickets"])
        _say_stages({"ready": _ready(run)}, document)
    else:
        _say_stats(run, document)
    _say_slowest(run, document)


def _say_tickets(run: RecordedRun, document: Document) -> None:
    states = Counter(ticket["state"] for ticket in run.tickets)
    failures = Counter(ticket["error"] for ticket in run.tickets if ticket["error"])
    items = sum(ticket["items"] for ticket in run.tickets)
    shared = sum(ticket["shared_items"] for ticket in run.tickets)
    document.facts(
        {
            "tickets": f"{len(run.tickets)}, {items} items, {shared} of them shared: {_counted(states)}",
            "failures": _counted(failures) or "none",
        }
    )


def _say_stats(run: RecordedRun, document: Document) -> None:
    stats = run.stats
    assert stats is not None
    document.content["stats"] = stats.as_dict()
    document.facts(
        {
            "batches": f"{stats.batches} of {stats.mean_batch_items:.1f} items, {stats.batch_fill:.1%} full",
            "rows": f"{stats.hit_rate:.1%} shared, {stats.evictions} evicted, {stats.discarded} discarded",
            "trouble": f"{stats.retries} retries, {stats.reductions} reductions, {stats.refused} requests "
            f"refused, {stats.lost_workers} workers lost",
        }
    )
    document.say()
    _say_stages({name: getattr(stats, name) for name in _STAGES}, document)
    document.say()
    mebibytes = Column("bytes", "MiB at most", lambda num_bytes: f"{num_bytes / 2**20:.1f}")
    rows = [[account, num_bytes] for account, num_bytes in stats.bytes_peak.items()]
    document.table("memory", [*columns(account="memory"), mebibytes], rows)


def _say_stages(stages: dict[str, Durations], document: Document) -> None:
    headers = {"mean_s": "mean ms", "p50_s": "p50 ms", "p99_s": "p99 ms", "longest_s": "longest ms"}
    milliseconds = [Column(key, header, _milliseconds) for key, header in headers.items()]
    rows: list[list[Any]] = []
    for name, each in stages.items():
        plain = each.as_dict()
        rows.append([_STAGES[name], each.count, *(plain[column.key] for column in milliseconds)])
    document.table("stages", [*columns(stage="what takes time", count="count"), *milliseconds], rows)


def _say_slowest(run: RecordedRun, document: Document) -> None:
    ready = [ticket for ticket in run.tickets if ticket["ready_s"] is not None]
    slowest = sorted(ready, key=lambda ticket: -ticket["ready_s"])[:_SLOWEST]
    if not slowest:
        return
    headers = {
        "request": "slowest",
        "items": "items",
        "tokens": "tokens",
        "ready_s": "ready after s",
        "queue_s": "waited s",
        "encode_s": "in batch s",
    }
    document.say()
    rows = [[ticket[key] for key in headers] for ticket in slowest]
    document.table("slowest", columns(**headers), rows)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _ready(run: RecordedRun) -> Durations:
    durations = Durations()
    for ticket in run.tickets:
        if ticket["ready_s"] is not None:
            durations.add(ticket["ready_s"])
    return durations


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())
