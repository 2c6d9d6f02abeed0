"""The service on a cluster of this machine: a crowd that is far more than it takes at once, and faults."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from fxsplit_encoder.service.encoder import QueuedEncoder
from fxsplit_encoder.service.ray_serve import joined
from fxsplit_encoder.service.settings import ServiceSettings

from ...models.embedding_models import save_model
from ...waiting import wait_until
from ..crowd import JPEG, LIMITS, Crowd, requests_of
from ..photographs import encoded, photograph
from ..serving import KEY, answers, free_port
from .processes import named

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]

Photographs = list[tuple[bytes, NDArray[Any]]]
"""Encoded images, and the vector of each."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("checkpoint"), "Siglip")[1]


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    import ray
    from ray import serve

    from fxsplit_encoder.service.ray_serve import app

    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    config = {"token_budgets": [4, 16, 64], "piece_compiler": "eager", "mode": "full"}
    serve.run(
        app({"model": str(model), "config": config, "max_requests": 24, **LIMITS}), route_prefix="/images"
    )
    yield f"http://127.0.0.1:{port}/images"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def photographs(model: Path) -> Photographs:
    encoder = QueuedEncoder(ServiceSettings(model=str(model), **KEY))
    files = [encoded(photograph(size=(40 + 20 * n, 60)), "JPEG") for n in range(7)]
    vectors = encoder.encode([encoder.preparer.load(data) for data in files])
    encoder.close()
    return list(zip(files, vectors, strict=True))


def test_every_request_of_a_crowd_is_answered(url: str) -> None:
    crowd, work = Crowd(url), requests_of(random.Random(2), 300)
    asyncio.run(crowd.run(work, 64))
    print(crowd.statuses)
    assert crowd.wrong == []
    assert crowd.statuses[429] > 0, "nobody was refused: this was no overload"
    assert set(crowd.statuses) <= {200, *(status for status, _ in work), 429}


def test_metrics_count_what_was_encoded(url: str, photographs: Photographs) -> None:
    data = {"content": photographs[0][0], "headers": JPEG}
    assert httpx.post(f"{url}/v1/embeddings", **data).status_code == 200
    names = ("images_total", "requests_total", "rows_total", "batch_images_bucket", "encode_seconds_count")

    def exposed() -> str:
        return httpx.get(f"{url}/metrics", timeout=30).text

    wait_until(lambda: all(f"ray_encoder_service_{name}{{" in exposed() for name in names), 300)
    text = exposed()
    assert 'by="hit"' in text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(families) == len(set(families))


def test_an_encoder_that_dies_is_replaced_and_nobody_notices_but_by_waiting(
    url: str, photographs: Photographs
) -> None:
    (replica,) = named("ray::ServeReplica:default:Encoder")
    os.kill(replica, signal.SIGKILL)
    statuses = []
    while statuses[-1:] != [200]:
        answer = httpx.post(f"{url}/v1/embeddings", content=photographs[0][0], headers=JPEG, timeout=120)
        statuses.append(answer.status_code)
    assert set(statuses) <= {200, 503}
    np.testing.assert_allclose([answer.json()["data"][0]["embedding"]], photographs[0][1], rtol=0, atol=1e-5)


def test_one_yaml_starts_it(model: Path, tmp_path: Path, photographs: Photographs) -> None:
    """The example's own file, with another model and port."""
    settings = yaml.safe_load((ROOT / "examples" / "serve.yaml").read_text("utf-8"))
    port = free_port()
    settings["http_options"] = {"host": "127.0.0.1", "port": port}
    (application,) = settings["applications"]
    application["args"] |= {"model": str(model), **KEY}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [Path(sys.executable).with_name("serve"), "run", tmp_path / "serve.yaml"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env={**os.environ, "RAY_ADDRESS": "local"},
            # What a shell runs in the background ignores the signal that ends this.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        data, expected = photographs[0]
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health", server, tmp_path / "log"))
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", content=data, headers=JPEG, timeout=60)
        np.testing.assert_allclose([answer.json()["data"][0]["embedding"]], expected, rtol=0, atol=1e-5)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def test_without_a_cluster_the_application_connects_to_one_of_its_own(model: Path) -> None:
    """As `serve run fxsplit_encoder.service.ray_serve:app model=...` needs it, which connects later."""
    code = "import sys, ray; from fxsplit_encoder.service.ray_serve import app; app({'model': sys.argv[1]}); "
    command = [sys.executable, "-c", code + "print('connected', ray.is_initialized())", str(model)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "RAY_ADDRESS": "local"}, capture_output=True, text=True
    )
    assert "connected True" in done.stdout, done.stderr


def test_texts_of_several_nodes_become_one() -> None:
    one = '# HELP ray_serve_x X\n# TYPE ray_serve_x counter\nray_serve_x{a="1"} 1\n# HELP other o\nother 3\n'
    two = one.replace('a="1"} 1', 'a="2"} 2')
    assert joined({"http://a": one, "http://b": None, "http://c": two}) == (
        "# http://b did not answer\n# HELP ray_serve_x X\n# TYPE ray_serve_x counter\n"
        'ray_serve_x{a="1"} 1\nray_serve_x{a="2"} 2\n'
    )
