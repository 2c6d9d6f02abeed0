"""The application on a Ray cluster: front ends that decode, and encoders with a GPU each.

`serve run fxsplit_encoder.service.ray_serve:app model=NAME` starts it, `import_path` in a YAML file too.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from fxsplit_encoder.errors import EncoderLostError
from fxsplit_encoder.integrations.prometheus import RayMetrics
from fxsplit_encoder.service.application import Application
from fxsplit_encoder.service.encoder import Item, Preparer, QueuedEncoder, Result
from fxsplit_encoder.service.settings import ServiceSettings

_HEALTH_TIMEOUT_S = 5.0
_SCRAPE_TIMEOUT_S = 2.0
_TRIES = 3

# The application refuses what is too much, in JSON; health checks are never refused.
_UNLIMITED = 1 << 20

PREFIXES = ("ray_encoder_service_", "ray_serve_")
"""Of the metrics that are shown."""


def app(args: dict[str, Any]) -> serve.Application:
    """Make the application, for `serve run`, of fields of `ServiceSettings`; ConfigError: one is wrong."""
    settings = ServiceSettings(**args)
    options = {
        "max_ongoing_requests": _UNLIMITED,
        "graceful_shutdown_timeout_s": settings.request_timeout_s,
    }
    if not ray.is_initialized():  # `serve run` calls this before it connects, and then uses this connection
        ray.init(namespace="serve")
    num_gpus = float(settings.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0)
    resources = {"num_cpus": 1, "num_gpus": num_gpus}
    encoder = serve.deployment(EncoderReplica, name="Encoder", ray_actor_options=resources, **options)
    frontend = serve.deployment(Frontend, name="Frontend", **options)
    application: serve.Application = frontend.bind(settings, encoder.bind(settings))
    return application


@serve.ingress()
class Frontend:
    """The replica that takes requests: reads, decodes and prepares, and answers. Its backend is the encoders
    of the cluster; if one ends with a request, another takes it, which does no harm.
    """

    def __init__(self, settings: ServiceSettings, encoder: Any) -> None:
        self._settings = settings
        self._encoder = encoder

    def __serve_build_asgi_app__(self) -> Any:
        """The Starlette application; Ray calls it."""
        return Application(self._settings, Preparer(self._settings), self, _ClusterMetrics()).app

    async def answer(self, items: Sequence[Item], tenant: str, timeout_s: float) -> tuple[list[Result], int]:
        """As of `Backend`."""
        for _ in range(_TRIES):
            try:
                found: tuple[list[Result], int] = await self._encoder.answer.remote(items, tenant, timeout_s)
                return found
            except (BackPressureError, DeploymentUnavailableError, RayActorError) as error:
                lost = error
        raise EncoderLostError(f"no encoder answers: {lost}")

    async def is_ready(self) -> bool:
        """As of `Backend`, by any encoder."""
        try:
            return bool(await asyncio.wait_for(self._encoder.is_ready.remote(), _HEALTH_TIMEOUT_S))
        except (TimeoutError, DeploymentUnavailableError, RayActorError) as error:
            raise EncoderLostError(f"no encoder answers: {error}") from error


class EncoderReplica(QueuedEncoder):
    """One tower, one GPU, one queue."""

    check_health = QueuedEncoder.is_ready
    """Serve calls it, and replaces the replica where it raises."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._metrics = RayMetrics()
        super().__init__(settings, observe=self._observe)
        self.preparer.steps.on_host.observe = self._metrics.add_on_host
        self.wait_started()

    def _observe(self, embeddings: Sequence[Any], seconds: float) -> None:
        self._metrics.add_batch(embeddings, seconds)
        self._metrics.set_served(self.first.manager.stats())


# --- metrics


class _ClusterMetrics(RayMetrics):
    async def exposition(self) -> str:
        """Counts of all nodes, where they arrive some seconds after they were made."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        urls = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes]
        texts = await asyncio.gather(*(asyncio.to_thread(_fetched, url) for url in urls))
        return joined(dict(zip(urls, texts, strict=True)))


def joined(texts: Mapping[str, str | None]) -> str:
    """Several nodes' texts as one, each metric's lines together, and what it is said once."""
    lines = [f"# {url} did not answer" for url, text in texts.items() if text is None]
    families: dict[str, dict[str, None]] = {}
    for text in texts.values():
        for family in f"\n{text or ''}".split("\n# HELP ")[1:]:
            if family.startswith(PREFIXES):
                own = f"# HELP {family}".splitlines()
                families.setdefault(family.split()[0], {}).update(dict.fromkeys(own))
    return "\n".join([*lines, *(line for family in sorted(families) for line in families[family])]) + "\n"


def _fetched(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=_SCRAPE_TIMEOUT_S) as response:
            text: str = response.read().decode("utf-8", "replace")
            return text
    except OSError:
        return None
