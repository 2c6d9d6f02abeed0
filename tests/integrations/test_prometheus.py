import importlib
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from fxsplit_encoder.connector.states import FAILURE_KINDS
from fxsplit_encoder.errors import InputError, MissingExtraError
from fxsplit_encoder.integrations.prometheus import ConnectorCollector, PrometheusCollector
from fxsplit_encoder.planning.limits import CaptureKey
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.runtime.statistics import BudgetStats, CaptureProgress, ManagerStats, Statistics
from tests.connector.scenes import Stage, connector, request, wait

BUDGETS = (
    "replays_total",
    "real_tokens_total",
    "padded_tokens_total",
    "graph_bytes",
    "calibrated_replay_seconds",
)


class Source:
    def __init__(self) -> None:
        self.statistics = Statistics(log_interval=0)

    def stats(self) -> ManagerStats:
        return self.statistics.snapshot()


def sample(registry: CollectorRegistry, name: str, of: str = "cudagraph", **labels: str) -> float | None:
    return registry.get_sample_value(f"encoder_{of}_{name}", labels)


def samples(registry: CollectorRegistry) -> list[Any]:
    return [sample for family in registry.collect() for sample in family.samples]


def test_a_scrape_shows_the_counts() -> None:
    source, registry = Source(), CollectorRegistry()
    PrometheusCollector(source, registry=registry)
    source.statistics.record_items(3)
    source.statistics.record_items(2, MissReason.NOT_CAPTURED)
    made = BudgetStats(mode="full", graph_bytes=2**20, timed_replays=2, milliseconds=4.0)
    source.statistics.record_captures({CaptureKey("default", 64): made}, 2**10)
    source.statistics.record_replay(CaptureKey("default", 64), 48)
    source.statistics.record_replay(CaptureKey("local", 128, ("wide", 3)), 128)
    assert sample(registry, "item_hits_total") == 3
    assert sample(registry, "item_misses_total", reason="not_captured") == 2
    small = {"path": "default", "token_budget": "64", "axis_keys": ""}
    assert [sample(registry, name, **small) for name in BUDGETS] == [1, 48, 16, 2**20, 0.002]
    large = {"path": "local", "token_budget": "128", "axis_keys": "wide, 3"}
    assert [sample(registry, name, **large) for name in BUDGETS[:-1]] == [1, 128, 0, 0]
    assert sample(registry, "calibrated_replay_seconds", **large) is None

    for kind in ("eager", "exact", "eager"):
        source.statistics.record_fallback(kind)
    assert [sample(registry, "fallback_runs_total", kind=kind) for kind in ("exact", "eager")] == [1, 2]
    assert sample(registry, "input_bytes") == 2**10

    source.statistics.record_items(4)
    assert sample(registry, "item_hits_total") == 7


def test_the_phase_of_work_that_nobody_waits_for() -> None:
    source, registry = Source(), CollectorRegistry()
    progress: CaptureProgress | None = None
    PrometheusCollector(
        lambda: replace(source.stats(), progress=progress, derived_bytes=2**20), registry=registry
    )
    assert sample(registry, "derived_bytes") == 2**20
    assert not any(each.name == "encoder_cudagraph_capture_phase" for each in samples(registry))
    progress = CaptureProgress("capturing", 3, 16)
    assert sample(registry, "capture_phase", phase="capturing") == 1
    assert sample(registry, "capture_phase", phase="done") == 0


def test_counters_of_items_start_at_zero() -> None:
    registry = CollectorRegistry()
    PrometheusCollector(Source(), registry=registry)
    assert len(samples(registry)) == 1 + len(MissReason) + 2 + 2
    assert [sample(registry, "fallback_runs_total", kind=kind) for kind in ("exact", "eager")] == [0, 0]
    assert sample(registry, "input_bytes") == 0
    assert all(sample(registry, "item_misses_total", reason=str(reason)) == 0 for reason in MissReason)


def test_every_sample_carries_the_users_labels() -> None:
    source, registry = Source(), CollectorRegistry()
    source.statistics.record_replay(CaptureKey("default", 64), 48)
    PrometheusCollector(source, {"model": "qwen"}, registry=registry)
    assert len(samples(registry)) > len(MissReason)
    assert all(each.labels["model"] == "qwen" for each in samples(registry))
    with pytest.raises(InputError, match="other names than the metrics' own; got path, reason"):
        PrometheusCollector(source, {"path": "a", "reason": "b", "c": "d"}, registry=registry)
    with pytest.raises(InputError, match="got kind"):
        PrometheusCollector(source, {"kind": "a"}, registry=registry)


def test_it_registers_itself_where_it_is_told_and_by_default_globally() -> None:
    collector = PrometheusCollector(Source())
    try:
        assert b"encoder_cudagraph_item_hits_total 0.0" in generate_latest(REGISTRY)
    finally:
        REGISTRY.unregister(collector)
    assert b"encoder_cudagraph" not in generate_latest(REGISTRY)


def test_a_registry_takes_one() -> None:
    registry = CollectorRegistry()
    PrometheusCollector(Source(), registry=registry)
    with pytest.raises(InputError, match=r"one without a PrometheusCollector; got .*pass another registry"):
        PrometheusCollector(Source(), registry=registry)


def test_a_scrape_shows_the_counts_of_a_connector() -> None:
    stage, registry = Stage(), CollectorRegistry()
    stage.faults["broken"] = lambda: ValueError("bad pixels")
    with connector(stage=stage, max_batch_items=1) as each:
        ConnectorCollector(each, {"model": "tiny"}, registry=registry)
        good, bad = each.submit(request("a", "a")), each.submit(request("broken"))
        wait(good), wait(bad)
        counted = partial(sample, registry, of="connector", model="tiny")
        assert counted("submitted_total") == 2
        assert counted("tickets_ended_total", state="failed") == 1
        assert counted("tickets_ended_total", state="released") == 0
        assert counted("item_failures_total", kind="encoder") == 1
        assert counted("lookups_total", found="join") == 1
        assert counted("bytes", account="device cpu") == 128
        assert counted("ready_seconds_count") == 1
        assert counted("ready_seconds_bucket", le="+Inf") == 1
        assert counted("batch_fill") == 1
        assert counted("live_tickets") == 1
        kinds = {each.labels.get("kind") for each in samples(registry) if "item_failures_total" in each.name}
        assert kinds == set(FAILURE_KINDS)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "fxsplit_encoder.integrations.prometheus")
    with pytest.raises(MissingExtraError, match=r"of the extra 'prometheus'; run: pip install "):
        importlib.import_module("fxsplit_encoder.integrations.prometheus")
