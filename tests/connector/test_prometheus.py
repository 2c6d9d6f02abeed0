from __future__ import annotations

import importlib
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fxsplit_encoder.connector.failures import FAILURE_KINDS
from fxsplit_encoder.connector.prometheus import ConnectorCollector
from fxsplit_encoder.errors import InputError, MissingExtraError

from .scenes import Stage, connector, request, wait

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(registry: CollectorRegistry) -> Samples:
    return {
        (sample.name.removeprefix("encoder_connector_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_a_scrape_shows_the_counts() -> None:
    stage, registry = Stage(), CollectorRegistry()
    stage.faults["broken"] = lambda: ValueError("bad pixels")
    with connector(stage=stage, max_batch_items=1) as each:
        ConnectorCollector(each, {"model": "tiny"}, registry=registry)
        good, bad = each.submit(request("a", "a")), each.submit(request("broken"))
        wait(good), wait(bad)
        samples = scrape(registry)
    assert of(samples, "submitted_total", model="tiny") == 2
    assert of(samples, "tickets_ended_total", model="tiny", state="failed") == 1
    assert of(samples, "tickets_ended_total", model="tiny", state="released") == 0
    assert of(samples, "item_failures_total", model="tiny", kind="encoder") == 1
    assert of(samples, "lookups_total", model="tiny", found="join") == 1
    assert of(samples, "bytes", model="tiny", account="device cpu") == 128
    assert of(samples, "ready_seconds_count", model="tiny") == 1
    assert of(samples, "ready_seconds_bucket", model="tiny", le="+Inf") == 1
    assert of(samples, "batch_fill", model="tiny") == 1
    assert of(samples, "live_tickets", model="tiny") == 1
    kinds = {dict(labels)["kind"] for name, labels in samples if name == "item_failures_total"}
    assert kinds == set(FAILURE_KINDS)


def test_labels_and_registries_are_checked() -> None:
    with connector() as each:
        with pytest.raises(
            InputError, match="labels: expected other names than the metrics' own; got account"
        ):
            ConnectorCollector(each, {"account": "x"}, registry=CollectorRegistry())
        registry = CollectorRegistry()
        ConnectorCollector(each, registry=registry)
        with pytest.raises(InputError, match="registry: expected one without a ConnectorCollector"):
            ConnectorCollector(each, registry=registry)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "fxsplit_encoder.connector.prometheus")
    with pytest.raises(MissingExtraError, match="extra 'prometheus'"):
        importlib.import_module("fxsplit_encoder.connector.prometheus")
