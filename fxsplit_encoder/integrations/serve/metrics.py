"""What the service counts, by Ray's metrics, and all nodes' counts in one text."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import ray
from ray.serve.metrics import Counter, Gauge, Histogram

from fxsplit_encoder.integrations.images import Result
from fxsplit_encoder.runtime.statistics import ManagerStats

PREFIXES = ("ray_encoder_service_", "ray_serve_")
"""Of the metrics that are shown."""

_SECONDS = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
_COUNTS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
_TIMEOUT_S = 2.0


class FrontendMetrics:
    """Of a process that takes requests."""

    def __init__(self) -> None:
        self._requests = Counter(
            "encoder_service_requests", description="Requests by status.", tag_keys=("status",)
        )
        self._seconds = Histogram(
            "encoder_service_request_seconds", description="From request to answer.", boundaries=_SECONDS
        )

    def add_request(self, status: int, seconds: float) -> None:
        """A request that was answered."""
        self._requests.inc(1, tags={"status": str(status)})
        self._seconds.observe(seconds)


class EncoderMetrics:
    """Of a process that encodes."""

    def __init__(self) -> None:
        self._images = Counter(
            "encoder_service_images", description="Images by outcome.", tag_keys=("outcome",)
        )
        self._rows = Counter("encoder_service_rows", description="Rows of embeddings.")
        self._batch = Histogram(
            "encoder_service_batch_images", description="Images encoded together.", boundaries=_COUNTS
        )
        self._seconds = Histogram(
            "encoder_service_encode_seconds", description="Of a batch, to its results.", boundaries=_SECONDS
        )
        self._served = Gauge(
            "encoder_service_served",
            description="Items since the start: hits of captures, and misses by reason.",
            tag_keys=("by",),
        )

    def add_batch(self, results: Sequence[Result], seconds: float, stats: ManagerStats) -> None:
        """A batch that was encoded."""
        arrays = [result for result in results if isinstance(result, np.ndarray)]
        for outcome, count in (("encoded", len(arrays)), ("refused", len(results) - len(arrays))):
            if count:
                self._images.inc(count, tags={"outcome": outcome})
        if arrays:
            self._rows.inc(sum(len(array) for array in arrays))
        self._batch.observe(len(results))
        self._seconds.observe(seconds)
        for by, count in {"hit": stats.hits, **{str(k): n for k, n in stats.misses.items()}}.items():
            self._served.set(count, tags={"by": by})


async def exposition(pool: ThreadPoolExecutor) -> str:
    """What all nodes of the cluster have counted, in Prometheus' text format. Counts arrive there some
    seconds after they were made.

    Args:
        pool: of threads that wait for the nodes.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    urls = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes]
    loop = asyncio.get_running_loop()
    texts = await asyncio.gather(*(loop.run_in_executor(pool, _fetched, url) for url in urls))
    return joined(dict(zip(urls, texts, strict=True)))


def joined(texts: Mapping[str, str | None]) -> str:
    """Several nodes' texts as one, each metric's lines together.

    Args:
        texts: by the address; None: it did not answer.
    """
    lines = [f"# {url} did not answer" for url, text in texts.items() if text is None]
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts.values():
        family = ""
        for line in (text or "").splitlines():
            if line.startswith("# HELP "):
                family = line.split()[2]
            if not family.startswith(PREFIXES):
                continue
            if not line.startswith("#"):
                samples.setdefault(family, []).append(line)
            elif line not in heads.setdefault(family, []):
                heads[family].append(line)
    lines += _flat(heads[family] + samples.get(family, []) for family in sorted(heads))
    return "\n".join(lines) + "\n"


def _flat(groups: Iterable[list[str]]) -> list[str]:
    return [line for group in groups for line in group]


def _fetched(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            text: str = response.read().decode("utf-8", "replace")
            return text
    except OSError:
        return None
