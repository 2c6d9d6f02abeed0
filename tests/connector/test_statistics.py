from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from fxsplit_encoder.cli.main import app
from fxsplit_encoder.connector.request import TEXT_ONLY
from fxsplit_encoder.connector.run_log import is_run, read_run
from fxsplit_encoder.connector.statistics import BOUNDS, ConnectorStats, Durations
from fxsplit_encoder.errors import InputError

from .scenes import Stage, connector, request, wait


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50))
def test_percentiles_are_bounds_that_hold(seconds: list[float]) -> None:
    durations = Durations()
    for each in seconds:
        durations.add(each)
    ordered = sorted(seconds)
    for percent in (50, 99, 100):
        bound = durations.percentile(percent)
        assert sum(each <= bound for each in ordered) * 100 >= percent * len(ordered)
        assert bound <= max(ordered[-1], 0)
    assert durations.count == len(seconds) and durations.mean == pytest.approx(sum(seconds) / len(seconds))
    assert Durations.from_dict(json.loads(json.dumps(durations.as_dict()))) == durations


def test_nothing_took_no_time() -> None:
    assert (Durations().mean, Durations().percentile(99), Durations().count) == (0.0, 0.0, 0)
    assert len(Durations().counts) == len(BOUNDS) + 1
    empty = ConnectorStats()
    assert (empty.hit_rate, empty.batch_fill, empty.mean_batch_items) == (0.0, 0.0, 0.0)
    assert str(empty).startswith("0 tickets (none ended)")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of a request that is released, one that shares with it, one that fails and one that goes on as text."""
    stage = Stage()
    stage.faults["broken"] = lambda: ValueError("bad pixels")
    with connector(stage=stage, max_batch_items=4) as each:
        each.record(tmp_path / "run.jsonl")
        tickets = [
            each.submit(request("a")),
            each.submit(request("a", "b")),
            each.submit(request("broken")),
            each.submit(request("broken", failure=TEXT_ONLY)),
        ]
        for ticket in tickets:
            wait(ticket)
            each.release(ticket)
    return tmp_path / "run.jsonl"


def test_a_run_is_recorded_and_read_again(run: Path) -> None:
    assert is_run(run)
    recorded = read_run(run)
    by_number = {ticket["ticket"]: ticket for ticket in recorded.tickets}
    assert [by_number[number]["state"] for number in range(1, 5)] == [
        "released",
        "released",
        "failed",
        "released",
    ]
    assert (by_number[3]["error"], by_number[4]["text_only"], by_number[4]["recounted"]) == (
        "encoder",
        True,
        1,
    )
    assert by_number[2]["items"] == 2 and by_number[2]["tokens"] == 8
    assert by_number[2]["shared_items"] == 1
    assert 0 < by_number[1]["ready_s"] < 60
    stats = recorded.stats
    assert stats is not None
    assert (stats.submitted, stats.items, stats.text_only) == (4, 5, 1)
    assert stats.outcomes == {"released": 3, "failed": 1}
    assert stats.failures == {"encoder": 2}
    assert stats.hits + stats.joins == 2 and stats.misses == 3
    assert stats.ready.count == 3
    assert 0 < stats.batch_fill <= 1
    assert set(stats.bytes_peak) >= {"host", "inputs", "staging worker 0"}
    assert "4 tickets (1 failed, 3 released), 5 items" in str(stats)


def test_a_run_that_was_killed_has_its_tickets(run: Path) -> None:
    lines = run.read_text().splitlines()
    run.write_text("\n".join(lines[:-1]))
    assert read_run(run).stats is None
    assert len(read_run(run).tickets) == 4


def test_what_is_no_run_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_run(file)
    for line in ('{"event": "party"}', "[]", "7", "{"):
        file.write_text(f'\n{{"event": "ticket"}}\n{line}\n')
        with pytest.raises(
            InputError, match=r"x.jsonl, line 2: expected an event of a connector's run; got "
        ):
            read_run(file)
    with pytest.raises(InputError, match="cannot be written"), connector() as each:
        each.record(tmp_path / "missing" / "run.jsonl")


def test_every_ticket_that_ends_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxsplit_encoder.connector.run_log")
    with connector() as each:
        ticket = each.submit(request("a"))
        wait(ticket)
        assert caplog.records == []
        each.release(ticket)
    (record,) = caplog.records
    line = json.loads(record.getMessage())
    assert (line["event"], line["request"], line["state"], line["error"]) == ("ticket", "r", "released", None)
    caplog.clear()
    with connector(log_tickets=False) as each:
        each.cancel(each.submit(request("a")))
    assert caplog.records == []


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_shows_a_recorded_run(run: Path) -> None:
    result = report(run)
    assert result.exit_code == 0, result.output
    assert "tickets  4, 5 items, 2 of them shared: 3 released, 1 failed" in result.stdout
    assert "failures 1 encoder" in result.stdout
    for words in ("wait for a worker", "staging worker 0", "ready after s", "batches "):
        assert words in result.stdout
    content = json.loads(report(run, "--json").stdout)
    assert content["stats"]["submitted"] == 4
    assert len(content["slowest"]) == 3
    run.write_text("\n".join(run.read_text().splitlines()[:-1]))
    assert "the run did not end by itself" in report(run).stdout


def test_a_connectors_run_has_no_page(run: Path, tmp_path: Path) -> None:
    result = report(run, "--output", tmp_path / "page.html")
    assert result.exit_code != 0
    assert "a connector's run has no page" in result.output
