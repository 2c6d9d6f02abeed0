"""The manager's statistics as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from fxsplit_encoder.errors import InputError, MissingExtraError
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.runtime.statistics import FALLBACK_KINDS, PHASES, BudgetStats, ManagerStats

try:
    from prometheus_client import REGISTRY
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError:
    raise MissingExtraError("PrometheusCollector", "prometheus") from None

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_PREFIX = "encoder_cudagraph"
_BUDGET_LABELS = ("path", "token_budget", "axis_keys")
_OWN_LABELS = {"reason", "kind", "phase", *_BUDGET_LABELS}


class StatsSource(Protocol):
    """What has statistics, for example an `EncoderCudaGraphManager`."""

    def stats(self) -> ManagerStats:
        """A snapshot of the counts."""
        ...


Source = StatsSource | Callable[[], ManagerStats]
"""What has statistics, or a function that takes them: `lambda: fxsplit_encoder.stats(model)`."""


class PrometheusCollector(Collector):
    """Exports the statistics of an encoder; each scrape takes a snapshot, serving is not touched.

    | metric | type | labels | meaning |
    |---|---|---|---|
    | `encoder_cudagraph_item_hits_total` | counter | | images and videos that replays alone served |
    | `encoder_cudagraph_item_misses_total` | counter | `reason` | those that fell back on some path |
    | `encoder_cudagraph_replays_total` | counter | budget | replays |
    | `encoder_cudagraph_fallback_runs_total` | counter | `kind` | runs without one: `exact` or `eager` |
    | `encoder_cudagraph_capture_phase` | gauge | `phase` | 1 in that of `capture(wait=False)` |
    | `encoder_cudagraph_input_bytes` | gauge | | device memory of the captures' static inputs |
    | `encoder_cudagraph_real_tokens_total` | counter | budget | output tokens of items in replays |
    | `encoder_cudagraph_padded_tokens_total` | counter | budget | output tokens of padding in replays |
    | `encoder_cudagraph_graph_bytes` | gauge | budget | device memory that the capture holds |
    | `encoder_cudagraph_calibrated_replay_seconds` | gauge | budget | of a replay, at capture |

    The budget labels are `path`, `token_budget` and `axis_keys`, which is empty for a tower without capture
    axes. All counters of items and fallbacks are there from the start, so that a rate sees the first miss.

    Args:
        source: the manager; or a function that returns statistics, for an accelerated model or a compiled
            module: `lambda: fxsplit_encoder.stats(model)`.
        labels: names and values that every sample carries, for example the model's name.
        registry: where the collector registers itself. It takes one collector; a second manager in the same
            process needs another registry.

    Raises:
        MissingExtraError: prometheus-client is not installed; importing this module raises it.
        InputError: a label is one of the metrics' own, or the registry has such metrics already.
    """

    def __init__(
        self,
        source: Source,
        labels: Mapping[str, str] | None = None,
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._read: Callable[[], ManagerStats] = source.stats if hasattr(source, "stats") else source
        self._labels = dict(labels or {})
        if taken := sorted(_OWN_LABELS & self._labels.keys()):
            raise InputError(f"labels: expected other names than the metrics' own; got {', '.join(taken)}")
        try:
            registry.register(self)
        except ValueError as error:
            raise InputError(
                f"registry: expected one without a PrometheusCollector; got {error}; pass another registry"
            ) from None

    def collect(self) -> Iterator[Metric]:
        """The metric families of this moment; Prometheus' client calls it at each scrape."""
        stats = self._read()
        yield from self._items(stats)
        yield from self._progress(stats)
        yield from self._paths(stats)
        yield from self._budgets(stats)

    def describe(self) -> list[Metric]:
        """The same, by whose names a registry refuses a second collector."""
        return list(self.collect())

    def _items(self, stats: ManagerStats) -> Iterator[Metric]:
        shared = list(self._labels.values())
        hits = CounterMetricFamily(
            f"{_PREFIX}_item_hits", "Images and videos that replays alone served.", labels=list(self._labels)
        )
        hits.add_metric(shared, stats.hits)
        yield hits
        misses = CounterMetricFamily(
            f"{_PREFIX}_item_misses",
            "Images and videos that fell back on some path.",
            labels=[*self._labels, "reason"],
        )
        for reason in MissReason:
            misses.add_metric([*shared, str(reason)], stats.misses.get(reason, 0))
        yield misses

    def _progress(self, stats: ManagerStats) -> Iterator[Metric]:
        phases = GaugeMetricFamily(
            f"{_PREFIX}_capture_phase",
            "1 in the phase of the work behind capture(wait=False).",
            labels=[*self._labels, "phase"],
        )
        for phase in PHASES if stats.progress is not None else ():
            assert stats.progress is not None
            phases.add_metric([*self._labels.values(), phase], float(phase == stats.progress.phase))
        yield phases

    def _paths(self, stats: ManagerStats) -> Iterator[Metric]:
        shared = list(self._labels.values())
        fallbacks = CounterMetricFamily(
            f"{_PREFIX}_fallback_runs",
            "Runs of a path without a replay.",
            labels=[*self._labels, "kind"],
        )
        for kind in FALLBACK_KINDS:
            fallbacks.add_metric([*shared, kind], stats.fallback_runs.get(kind, 0))
        yield fallbacks
        inputs = GaugeMetricFamily(
            f"{_PREFIX}_input_bytes", "Device memory of static inputs.", labels=list(self._labels)
        )
        inputs.add_metric(shared, stats.input_bytes)
        yield inputs

    def _budgets(self, stats: ManagerStats) -> Iterator[Metric]:
        names = [*self._labels, *_BUDGET_LABELS]
        replays = CounterMetricFamily(f"{_PREFIX}_replays", "Replays of the budget.", labels=names)
        real = CounterMetricFamily(f"{_PREFIX}_real_tokens", "Output tokens of items.", labels=names)
        padded = CounterMetricFamily(f"{_PREFIX}_padded_tokens", "Output tokens of padding.", labels=names)
        held = GaugeMetricFamily(f"{_PREFIX}_graph_bytes", "Device memory of the capture.", labels=names)
        mean = GaugeMetricFamily(
            f"{_PREFIX}_calibrated_replay_seconds", "Time of a replay, measured at capture.", labels=names
        )
        budget: BudgetStats
        for key, budget in stats.budgets.items():
            values = [*self._labels.values(), *_budget_values(key)]
            replays.add_metric(values, budget.replays)
            real.add_metric(values, budget.real_tokens)
            padded.add_metric(values, budget.padded_tokens)
            held.add_metric(values, budget.graph_bytes)
            if budget.mean_milliseconds is not None:
                mean.add_metric(values, budget.mean_milliseconds / 1e3)
        yield from (replays, real, padded, held, mean)


def _budget_values(key: tuple[Any, ...]) -> list[str]:
    """Path, budget and axis keys of an entry: (path, budget), or with a tuple of axis keys after them."""
    path, budget, *axes = key
    return [str(path), str(budget), ", ".join(str(axis) for keys in axes for axis in keys)]
