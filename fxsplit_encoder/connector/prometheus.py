"""The connector's statistics as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from fxsplit_encoder.connector.failures import FAILURE_KINDS
from fxsplit_encoder.connector.states import State
from fxsplit_encoder.connector.statistics import BOUNDS, ConnectorStats
from fxsplit_encoder.errors import InputError, MissingExtraError

try:
    from prometheus_client import REGISTRY
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError:
    raise MissingExtraError("ConnectorCollector", "prometheus") from None

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_PREFIX = "encoder_connector"
_OWN_LABELS = {"state", "kind", "found", "account"}
_ENDS = (State.RELEASED, State.FAILED, State.CANCELLED)

_COUNTERS = {
    "submitted": "Tickets.",
    "items": "Items of all tickets.",
    "refused": "Requests for which too much was waiting.",
    "text_only": "Tickets that went on without their media.",
    "rejected_hits": "Rows that were there, but not as many as the item has tokens.",
    "evictions": "Features that made way for others.",
    "evicted_bytes": "Bytes of these.",
    "discarded": "Features that nobody wanted any more when they were encoded.",
    "retries": "Encodings that were tried again.",
    "reductions": "Items of which less was asked after memory ran out.",
    "batches": "Batches.",
    "batch_items": "Items of all batches.",
    "batch_tokens": "Output tokens of all batches.",
    "split_batches": "Batches that failed and were halved.",
    "lost_workers": "Workers that were lost.",
    "worker_restarts": "Workers that were started again.",
}
_GAUGES = {
    "waiting_items": "Items that are not ready.",
    "live_tickets": "Tickets that wait for something or hold something.",
    "batch_fill": "Share of the places in batches that items had.",
}
_DURATIONS = {
    "prepare": "Hashing, decoding and preprocessing of one item.",
    "queue": "From being preprocessed to being taken into a batch.",
    "encode": "From being taken into a batch to being ready.",
    "ready": "From a ticket's submission to its being ready.",
}


class StatsSource(Protocol):
    """What has statistics, for example a `Connector`."""

    def stats(self) -> ConnectorStats:
        """A snapshot of the counts."""
        ...


class ConnectorCollector(Collector):
    """Exports the statistics of a connector; each scrape takes a snapshot.

    Every metric's name begins with `encoder_connector_`:

    | metric | type | labels | meaning |
    |---|---|---|---|
    | `tickets_ended_total` | counter | `state` | tickets by how they ended |
    | `item_failures_total` | counter | `kind` | items that failed |
    | `lookups_total` | counter | `found` | items: `hit`, `join` (rows in the making), `miss` |
    | `bytes`, `peak_bytes` | gauge | `account` | memory that is, and at most was, reserved |
    | `prepare_seconds`, `queue_seconds`, `encode_seconds`, `ready_seconds` | histogram | | how long it took |
    | `waiting_items`, `live_tickets`, `batch_fill` | gauge | | now |
    | every other count of `ConnectorStats`, with `_total` | counter | | as there |

    Args:
        source: the connector.
        labels: names and values that every sample carries, for example the model's name.
        registry: where the collector registers itself. It takes one; a second connector in the same process
            needs another registry.

    Raises:
        MissingExtraError: prometheus-client is not installed; importing this module raises it.
        InputError: a label is one of the metrics' own, or the registry has such metrics already.
    """

    def __init__(
        self,
        source: StatsSource,
        labels: Mapping[str, str] | None = None,
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._source = source
        self._labels = dict(labels or {})
        if taken := sorted(_OWN_LABELS & self._labels.keys()):
            raise InputError(f"labels: expected other names than the metrics' own; got {', '.join(taken)}")
        try:
            registry.register(self)
        except ValueError as error:
            raise InputError(
                f"registry: expected one without a ConnectorCollector; got {error}; pass another registry"
            ) from None

    def collect(self) -> Iterator[Metric]:
        """The metric families of this moment; Prometheus' client calls it at each scrape."""
        stats = self._source.stats()
        names, values = list(self._labels), list(self._labels.values())
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=names)
            counter.add_metric(values, getattr(stats, name))
            yield counter
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=names)
            gauge.add_metric(values, getattr(stats, name))
            yield gauge
        yield from self._labeled(stats)
        yield from self._histograms(stats)

    def describe(self) -> list[Metric]:
        """The same, by whose names a registry refuses a second collector."""
        return list(self.collect())

    def _labeled(self, stats: ConnectorStats) -> Iterator[Metric]:
        """Counters are there from the start, so that a rate sees the first of each kind."""
        names, values = list(self._labels), list(self._labels.values())
        counts: list[tuple[str, str, str, Mapping[str, int]]] = [
            ("tickets_ended", "Tickets.", "state", {str(end): stats.outcomes.get(end, 0) for end in _ENDS}),
            (
                "item_failures",
                "Items that failed.",
                "kind",
                {kind: stats.failures.get(kind, 0) for kind in FAILURE_KINDS},
            ),
            (
                "lookups",
                "Items by what was found of them.",
                "found",
                {"hit": stats.hits, "join": stats.joins, "miss": stats.misses},
            ),
        ]
        for name, text, label, found in counts:
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=[*names, label])
            for value, count in found.items():
                counter.add_metric([*values, value], count)
            yield counter
        for name, text, used in (
            ("bytes", "Memory that is reserved.", stats.bytes_used),
            ("peak_bytes", "The most that was reserved.", stats.bytes_peak),
        ):
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=[*names, "account"])
            for account, num_bytes in used.items():
                gauge.add_metric([*values, account], num_bytes)
            yield gauge

    def _histograms(self, stats: ConnectorStats) -> Iterator[Metric]:
        bounds = [*map(str, BOUNDS), "+Inf"]
        for name, text in _DURATIONS.items():
            each = getattr(stats, name)
            histogram = HistogramMetricFamily(f"{_PREFIX}_{name}_seconds", text, labels=list(self._labels))
            buckets = list(zip(bounds, map(float, accumulate(each.counts)), strict=True))
            histogram.add_metric(list(self._labels.values()), buckets, each.total)
            yield histogram
