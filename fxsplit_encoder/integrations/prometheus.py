"""The statistics of managers, connectors and the service as Prometheus metrics.

Those of a manager and a connector are counted anyway: a collector reads a snapshot at each scrape. On Ray the
service's processes count by Ray's metrics, which Ray exposes on every node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from fxsplit_encoder.connector.states import FAILURE_KINDS, State
from fxsplit_encoder.connector.statistics import BOUNDS, ConnectorStats, Durations
from fxsplit_encoder.encode_queue.queue import QueueStats
from fxsplit_encoder.errors import InputError, MissingExtraError
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.runtime.statistics import FALLBACK_KINDS, PHASES, ManagerStats

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError:
    raise MissingExtraError("Prometheus metrics", "prometheus") from None

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Stats_co = TypeVar("Stats_co", covariant=True)
Stats = TypeVar("Stats")


class StatsSource(Protocol[Stats_co]):
    """An object with statistics, for example an `EncoderCudaGraphManager` or a `Connector`."""

    def stats(self) -> Stats_co:
        """A snapshot of the counts."""
        ...


class _StatsCollector(Collector, Generic[Stats]):
    """Registers itself, and makes the metrics of a snapshot.

    Args:
        source: what has statistics, or a function that returns them.
        labels: names and values that every sample carries, for example the model's name.
        registry: where the collector registers itself. It takes one collector of a kind; a second source in
            the same process needs another registry.

    Raises:
        MissingExtraError: prometheus-client is not installed; importing this module raises it.
        InputError: a label is one of the metrics' own, or the registry has such metrics already.
    """

    _prefix: ClassVar[str]
    _own_labels: ClassVar[frozenset[str]]

    def __init__(
        self,
        source: StatsSource[Stats] | Callable[[], Stats],
        labels: Mapping[str, str] | None = None,
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._read: Callable[[], Stats] = source.stats if hasattr(source, "stats") else source
        self._labels = dict(labels or {})
        if taken := sorted(self._own_labels & self._labels.keys()):
            raise InputError(f"labels: expected other names than the metrics' own; got {', '.join(taken)}")
        try:
            registry.register(self)
        except ValueError as error:
            raise InputError(
                f"registry: expected one without a {type(self).__name__}; got {error}; pass another registry"
            ) from None

    def describe(self) -> list[Metric]:
        """What `collect` yields, by whose names a registry refuses a second collector."""
        return list(self.collect())

    def _family(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        samples: float | Iterable[tuple[tuple[str, ...], float]],
        labels: Sequence[str] = (),
    ) -> Metric:
        """A metric with one sample, or with a sample for each tuple of values of its own labels."""
        family = kind(f"{self._prefix}_{name}", text, labels=[*self._labels, *labels])
        for values, value in [((), samples)] if isinstance(samples, int | float) else samples:
            family.add_metric([*self._labels.values(), *values], value)
        return family


class PrometheusCollector(_StatsCollector[ManagerStats]):
    """Exports the statistics of a manager, or those that `lambda: fxsplit_encoder.stats(model)` returns.

    | metric | type | labels | meaning |
    |---|---|---|---|
    | `encoder_cudagraph_item_hits_total` | counter | | images and videos that replays alone served |
    | `encoder_cudagraph_item_misses_total` | counter | `reason` | those that fell back on some path |
    | `encoder_cudagraph_replays_total` | counter | budget | replays |
    | `encoder_cudagraph_fallback_runs_total` | counter | `kind` | runs without one: `exact` or `eager` |
    | `encoder_cudagraph_capture_phase` | gauge | `phase` | 1 in that of `capture(wait=False)` |
    | `encoder_cudagraph_input_bytes` | gauge | | device memory of the captures' static inputs |
    | `encoder_cudagraph_derived_bytes` | gauge | | device memory of parameters in another form |
    | `encoder_cudagraph_real_tokens_total` | counter | budget | output tokens of items in replays |
    | `encoder_cudagraph_padded_tokens_total` | counter | budget | output tokens of padding in replays |
    | `encoder_cudagraph_graph_bytes` | gauge | budget | device memory that the capture holds |
    | `encoder_cudagraph_calibrated_replay_seconds` | gauge | budget | of a replay, at capture |

    The budget labels are `path`, `token_budget` and `axis_keys`, which is empty for a tower without capture
    axes. All counters of items and fallbacks are there from the start, so that a rate sees the first miss.
    """

    _prefix = "encoder_cudagraph"
    _budget_labels = ("path", "token_budget", "axis_keys")
    _own_labels = frozenset({"reason", "kind", "phase", *_budget_labels})

    def collect(self) -> Iterator[Metric]:
        """The metric families of this moment; Prometheus' client calls it at each scrape."""
        stats, counter, gauge = self._read(), CounterMetricFamily, GaugeMetricFamily
        yield self._family(counter, "item_hits", "Images and videos that replays alone served.", stats.hits)
        misses = [((str(reason),), stats.misses.get(reason, 0)) for reason in MissReason]
        text = "Images and videos that fell back on some path."
        yield self._family(counter, "item_misses", text, misses, ["reason"])
        phase = stats.progress.phase if stats.progress is not None else None
        phases = [((name,), float(name == phase)) for name in PHASES if phase is not None]
        text = "1 in the phase of the work behind capture(wait=False)."
        yield self._family(gauge, "capture_phase", text, phases, ["phase"])
        runs = [((kind,), stats.fallback_runs.get(kind, 0)) for kind in FALLBACK_KINDS]
        yield self._family(counter, "fallback_runs", "Runs of a path without a replay.", runs, ["kind"])
        yield self._family(gauge, "input_bytes", "Device memory of static inputs.", stats.input_bytes)
        text = "Device memory of parameters in another form."
        yield self._family(gauge, "derived_bytes", text, stats.derived_bytes)
        budgets = [(_budget_values(key), budget) for key, budget in stats.budgets.items()]
        for kind, name, text in (
            (counter, "replays", "Replays of the budget."),
            (counter, "real_tokens", "Output tokens of items."),
            (counter, "padded_tokens", "Output tokens of padding."),
            (gauge, "graph_bytes", "Device memory of the capture."),
        ):
            samples = [(values, getattr(budget, name)) for values, budget in budgets]
            yield self._family(kind, name, text, samples, self._budget_labels)
        means = [(values, budget.mean_milliseconds) for values, budget in budgets]
        seconds = [(values, mean / 1e3) for values, mean in means if mean is not None]
        text = "Time of a replay, measured at capture."
        yield self._family(gauge, "calibrated_replay_seconds", text, seconds, self._budget_labels)


def _budget_values(key: tuple[Any, ...]) -> tuple[str, ...]:
    """Path, budget and axis keys of an entry: (path, budget), or with a tuple of axis keys after them."""
    path, budget, *axes = key
    return str(path), str(budget), ", ".join(str(axis) for keys in axes for axis in keys)


_ENDS = (State.RELEASED, State.FAILED, State.CANCELLED)

_LOOKUPS = {"hit": "hits", "join": "joins", "miss": "misses"}
_GAUGES = ("waiting_items", "live_tickets", "batch_fill")
_NO_COUNTERS = {*_LOOKUPS.values(), *_GAUGES, "max_batch_items"}


class ConnectorCollector(_StatsCollector[ConnectorStats]):
    """Exports the statistics of a connector. Every metric's name begins with `encoder_connector_`:

    | metric | type | labels | meaning |
    |---|---|---|---|
    | `tickets_ended_total` | counter | `state` | tickets by how they ended |
    | `item_failures_total` | counter | `kind` | items that failed |
    | `lookups_total` | counter | `found` | items: `hit`, `join` (rows in the making), `miss` |
    | `bytes`, `peak_bytes` | gauge | `account` | memory that is, and at most was, reserved |
    | `prepare_seconds`, `queue_seconds`, `encode_seconds`, `ready_seconds` | histogram | | how long it took |
    | `waiting_items`, `live_tickets`, `batch_fill` | gauge | | now |
    | every other count of `ConnectorStats`, with `_total` | counter | | as there |
    """

    _prefix = "encoder_connector"
    _own_labels = frozenset({"state", "kind", "found", "account"})

    def collect(self) -> Iterator[Metric]:
        """The metric families of this moment; Prometheus' client calls it at each scrape."""
        stats, counter, gauge = self._read(), CounterMetricFamily, GaugeMetricFamily
        for name, value in vars(stats).items():
            text = f"`{name}` of ConnectorStats."
            if isinstance(value, Durations):
                yield self._histogram(f"{name}_seconds", text, value)
            elif isinstance(value, int) and name not in _NO_COUNTERS:
                yield self._family(counter, name, text, value)
        for name in _GAUGES:
            yield self._family(gauge, name, f"`{name}` of ConnectorStats.", getattr(stats, name))
        # There from the start, so that a rate sees the first of each kind.
        ended = [((str(end),), stats.outcomes.get(end, 0)) for end in _ENDS]
        yield self._family(counter, "tickets_ended", "Tickets.", ended, ["state"])
        failed = [((kind,), stats.failures.get(kind, 0)) for kind in FAILURE_KINDS]
        yield self._family(counter, "item_failures", "Items that failed.", failed, ["kind"])
        found = [((result,), getattr(stats, name)) for result, name in _LOOKUPS.items()]
        yield self._family(counter, "lookups", "Items by what was found of them.", found, ["found"])
        for name, text, used in (
            ("bytes", "Memory that is reserved.", stats.bytes_used),
            ("peak_bytes", "The most that was reserved.", stats.bytes_peak),
        ):
            samples = [((account,), num_bytes) for account, num_bytes in used.items()]
            yield self._family(gauge, name, text, samples, ["account"])

    def _histogram(self, name: str, text: str, durations: Durations) -> Metric:
        histogram = HistogramMetricFamily(f"{self._prefix}_{name}", text, labels=list(self._labels))
        bounds = [*map(str, BOUNDS), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(durations.counts)), strict=True))
        histogram.add_metric(list(self._labels.values()), buckets, durations.total)
        return histogram


_SECONDS = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
_COUNTS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]


Add = Callable[..., None]
"""Adds to a metric, or observes: the value, then its labels by name."""


class ServiceMetrics:
    """Counts requests and batches of the service.

    Args:
        make: a metric of a kind ("counter", "histogram"), by name, text, labels and bounds of buckets.
    """

    def __init__(self, make: Callable[[str, str, str, tuple[str, ...], Sequence[float]], Add]) -> None:
        prefix = "encoder_service"
        self._requests = make("counter", f"{prefix}_requests", "Requests by status.", ("status",), ())
        text = "From request to answer."
        self._request_seconds = make("histogram", f"{prefix}_request_seconds", text, (), _SECONDS)
        self._items = make("counter", f"{prefix}_images", "Items by outcome.", ("outcome",), ())
        self._rows = make("counter", f"{prefix}_rows", "Rows of embeddings.", (), ())
        text = "Items encoded together."
        self._batch = make("histogram", f"{prefix}_batch_images", text, (), _COUNTS)
        text = "Images of which the host did more than on_device asks, by the reason."
        self._on_host = make("counter", f"{prefix}_images_on_host", text, ("reason",), ())
        text = "Of a batch, to its results."
        self._seconds = make("histogram", f"{prefix}_encode_seconds", text, (), _SECONDS)

    def add_request(self, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self._requests(1, status=str(status))
        self._request_seconds(seconds)

    def add_batch(self, embeddings: Sequence[Any], seconds: float) -> None:
        """Count a batch that was encoded."""
        self._items(len(embeddings), outcome="encoded")
        self._rows(sum(len(embedding) for embedding in embeddings))
        self._batch(len(embeddings))
        self._seconds(seconds)

    def add_refused(self) -> None:
        """Count an item that the tower refused."""
        self._items(1, outcome="refused")

    def add_on_host(self, reason: str) -> None:
        """Count an image of which the host did more than `on_device` asks."""
        self._on_host(1, reason=reason)

    async def exposition(self) -> str:
        """All counts in Prometheus' text format."""
        raise NotImplementedError


class LocalMetrics(ServiceMetrics):
    """Those of a service in this process, with the statistics of its queue and managers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def make(kind: str, name: str, text: str, labels: tuple[str, ...], bounds: Sequence[float]) -> Add:
            if kind == "counter":
                counter = Counter(name, text, labels, registry=self.registry)
                return lambda value, **own: (counter.labels(**own) if own else counter).inc(value)
            histogram = Histogram(name, text, labels, buckets=bounds, registry=self.registry)
            return lambda value: histogram.observe(value)

        super().__init__(make)

    def watch(self, queue: StatsSource[QueueStats], managers: Sequence[StatsSource[ManagerStats]]) -> None:
        """Export the counts of a queue, and the statistics of managers together, at each scrape."""
        for name in vars(queue.stats()):
            text = f"`{name}` of QueueStats."
            gauge = Gauge(f"encoder_service_queue_{name}", text, registry=self.registry)

            def read(name: str = name) -> float:
                return float(getattr(queue.stats(), name))

            gauge.set_function(read)
        PrometheusCollector(lambda: ManagerStats.total([m.stats() for m in managers]), registry=self.registry)

    async def exposition(self) -> str:
        """All counts in Prometheus' text format."""
        return generate_latest(self.registry).decode()


class RayMetrics(ServiceMetrics):
    """Those of a replica of Ray Serve, which Ray exposes on every node."""

    def __init__(self) -> None:
        from ray.serve import metrics

        def make(kind: str, name: str, text: str, labels: tuple[str, ...], bounds: Sequence[float]) -> Add:
            if kind == "counter":
                counter = metrics.Counter(name, description=text, tag_keys=labels)
                return lambda value, **own: counter.inc(value, tags=own) if value else None
            histogram = metrics.Histogram(name, description=text, boundaries=list(bounds))
            return lambda value: histogram.observe(value)

        super().__init__(make)
        text = "Items since the start: hits of captures, and misses by reason."
        self._served = metrics.Gauge("encoder_service_served", description=text, tag_keys=("by",))

    def set_served(self, stats: ManagerStats) -> None:
        """Publish what captures have served."""
        for by, count in {"hit": stats.hits, **{str(k): n for k, n in stats.misses.items()}}.items():
            self._served.set(count, tags={"by": by})
