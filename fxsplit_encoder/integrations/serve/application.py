"""The application that `serve run` starts: front ends that decode, and encoders with a GPU each."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve.config import BackpressureConfig

from fxsplit_encoder.integrations.serve.encoder import EncoderReplica
from fxsplit_encoder.integrations.serve.frontend import Frontend
from fxsplit_encoder.integrations.serve.requests import ServiceSettings

_UNLIMITED = 1 << 24


def app(args: dict[str, Any]) -> serve.Application:
    """The application: `serve run fxsplit_encoder.integrations.serve:app`, or `import_path` in a YAML file.

    Args:
        args: those of `ServiceSettings`; `model` has no default.

    Raises:
        ConfigError: an argument is unknown or not allowed.
    """
    settings = ServiceSettings(**args)
    refuse = BackpressureConfig(status_code=settings.refusal_status, retry_after_s=settings.retry_after_s)
    encoder = serve.deployment(
        EncoderReplica,
        name="Encoder",
        num_replicas=settings.encoders,
        # Front ends send as many as they work on, so they alone limit them. Ray warns of fewer than tokens.
        max_ongoing_requests=_UNLIMITED,
        ray_actor_options={"num_cpus": 1, "num_gpus": _num_gpus(settings)},
        backpressure_config=refuse,
    )
    frontend = serve.deployment(
        Frontend,
        name="Frontend",
        num_replicas=settings.frontends,
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=settings.max_queued_requests,
        ray_actor_options={"num_cpus": 1},
        backpressure_config=refuse,
    )
    application: serve.Application = frontend.bind(settings, encoder.bind(settings))
    return application


def _num_gpus(settings: ServiceSettings) -> float:
    if settings.gpus_per_encoder is not None:
        return settings.gpus_per_encoder
    return float(settings.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0)
