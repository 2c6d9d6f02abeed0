"""The service on a cluster of this machine: 1,000 requests of 64 clients, far more than it takes at once."""

from __future__ import annotations

import base64
import collections
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from PIL import Image

from fxsplit_encoder.service.encoder import QueuedEncoder
from fxsplit_encoder.service.ray_serve import joined
from fxsplit_encoder.towers.inputs import PixelValues

from ...models.checkpoints import save
from ...waiting import wait_until
from ..photographs import EXAMPLES, b64, blank, encoded, settings_of
from ..serving import free_port
from .processes import named

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
CLIENTS, REQUESTS = 64, 1000
ONGOING = 24
MOST_BYTES = 200_000

Photographs = list[tuple[bytes, NDArray[Any]]]
"""Encoded images, and what `manager.execute` makes of each."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("checkpoint"), "siglip")[1]


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    import ray
    from ray import serve

    from fxsplit_encoder.service.ray_serve import app

    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    arguments = {
        "model": str(model),
        "config": {"token_budgets": [4, 16, 64], "piece_compiler": "eager", "mode": "full"},
        "max_request_bytes": MOST_BYTES,
        "max_pixels": 1 << 20,
        "max_requests": ONGOING,
        "pooling": "none",
    }
    serve.run(app(arguments), route_prefix="/images")
    yield f"http://127.0.0.1:{port}/images"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def photographs(model: Path) -> Photographs:
    encoder = QueuedEncoder(settings_of(model))
    values = PixelValues(encoder.preparer.values, torch.float32, torch.device("cpu"))
    draw, made = random.Random(1), []
    for path in sorted(EXAMPLES.iterdir()):
        for _ in range(4):
            image = Image.open(path).convert("RGB").resize((draw.randint(30, 200), draw.randint(30, 200)))
            data = encoded(image, "JPEG")
            inputs = encoder.preparer.load(data).inputs
            pixels = values(torch.from_numpy(inputs["pixel_values"]))
            (expected,) = encoder.first.manager.execute({"pixel_values": pixels})
            made.append((data, expected.numpy()))
    return made


def embedding_of(entry: dict[str, Any]) -> NDArray[Any]:
    given = entry["embedding"]
    values = (
        np.frombuffer(base64.b64decode(given), "<f4") if isinstance(given, str) else np.array(given, "f4")
    )
    return values.reshape(entry["shape"])


def arguments_of(data: bytes, form: int) -> dict[str, Any]:
    """The same image in one of three forms."""
    if form == 0:
        return {"files": {"image": ("a.jpg", data, "image/jpeg")}, "data": {"encoding_format": "base64"}}
    if form == 1:
        return {"json": {"input": {"image": b64(data)}}}
    return {"content": data, "headers": {"content-type": "image/jpeg"}}


class Client:
    """Sends every request until it is answered by something else than a refusal."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/v1/embeddings"
        self.statuses: collections.Counter[int] = collections.Counter()
        self.seconds: list[float] = []
        """Of every answer but refusals."""
        self._lock = threading.Lock()

    def send(self, client: httpx.Client, arguments: dict[str, Any]) -> httpx.Response:
        while True:
            begin = time.monotonic()
            response = client.post(self.url, **arguments)
            with self._lock:
                self.statuses[response.status_code] += 1
                if response.status_code not in (429, 503):
                    self.seconds.append(time.monotonic() - begin)
            if response.status_code not in (429, 503):
                return response
            assert int(response.headers["retry-after"]) >= 1
            time.sleep(int(response.headers["retry-after"]) * random.uniform(0.5, 1.5))


def test_every_request_of_a_crowd_is_answered(url: str, photographs: Photographs) -> None:
    kinds = {
        "damaged": (photographs[0][0][:200], 422, "undecodable_image"),
        "no image": (b"no image", 422, "undecodable_image"),
        "huge": (blank(1200), 422, "undecodable_image"),
        "oversize": (bytes(MOST_BYTES + 1), 413, "too_large"),
    }
    client, draw = Client(url), random.Random(2)
    work = [
        (
            draw.choice(list(kinds)) if draw.random() < 0.2 else draw.randrange(len(photographs)),
            draw.randrange(3),
        )
        for _ in range(REQUESTS)
    ]

    def answer(share: list[tuple[Any, int]]) -> int:
        with httpx.Client(timeout=120) as connection:
            for what, form in share:
                check(client.send(connection, arguments_of(data_of(what), form)), what)
        return len(share)

    def data_of(what: Any) -> bytes:
        return kinds[what][0] if isinstance(what, str) else photographs[what][0]

    def check(response: httpx.Response, what: Any) -> None:
        if isinstance(what, str):
            assert (response.status_code, response.json()["error"]["type"]) == kinds[what][1:]
            return
        assert response.status_code == 200, response.text
        (entry,) = response.json()["data"]
        np.testing.assert_allclose(embedding_of(entry), photographs[what][1], rtol=0, atol=1e-5)

    begin = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answered = sum(pool.map(answer, [work[n::CLIENTS] for n in range(CLIENTS)]))
    whole, (*_, slowest) = time.monotonic() - begin, sorted(client.seconds)
    median = statistics.median(client.seconds)
    print(f"{whole:.0f} s, {client.statuses}, answered after {median:.2f} s, at most {slowest:.2f} s")
    assert answered == REQUESTS
    refused = client.statuses.pop(429)
    assert refused > 0, "nobody was refused: this was no overload"
    assert client.statuses.keys() == {200, 413, 422}
    assert client.statuses.total() == REQUESTS


def test_several_images_are_one_answer_in_order(url: str, photographs: Photographs) -> None:
    chosen = photographs[3:10]
    files = [("image", (f"{n}.jpg", data)) for n, (data, _) in enumerate(chosen)]
    answer = httpx.post(f"{url}/v1/embeddings", files=files, timeout=60).json()
    assert answer["usage"] == {"prompt_tokens": 28, "total_tokens": 28, "images": 7, "rows": 28}
    for index, (entry, (_, expected)) in enumerate(zip(answer["data"], chosen, strict=True)):
        assert (entry["index"], entry["layout"]) == (index, {"tiles": 1})
        np.testing.assert_allclose(embedding_of(entry), expected, rtol=0, atol=1e-5)
    files.insert(2, ("image", ("bad.jpg", b"no image")))
    error = httpx.post(f"{url}/v1/embeddings", files=files, timeout=60)
    assert (error.status_code, error.json()["error"]["index"]) == (422, 2)


def test_health_and_other_paths(url: str) -> None:
    health = httpx.get(f"{url}/health").json()
    assert health["status"] == "ok"
    assert health["encoder"]["max_batch_tokens"] == 64
    assert httpx.head(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/v1/embeddings").status_code == 405
    assert httpx.get(f"{url}/nothing").status_code == 404
    assert httpx.get(f"{url.removesuffix('/images')}/-/healthz").text == "success"


def test_metrics_count_what_was_encoded(url: str, photographs: Photographs) -> None:
    data = {"content": photographs[0][0], "headers": {"content-type": "image/jpeg"}}
    assert httpx.post(f"{url}/v1/embeddings", **data).status_code == 200
    wait_until(
        lambda: "ray_encoder_service_images_total{" in httpx.get(f"{url}/metrics", timeout=30).text, 300
    )
    text = httpx.get(f"{url}/metrics", timeout=30).text
    for name in ("requests_total", "rows_total", "batch_images_bucket", "encode_seconds_count"):
        assert f"ray_encoder_service_{name}{{" in text
    assert 'by="hit"' in text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(families) == len(set(families))


def test_an_encoder_that_dies_is_replaced_and_nobody_notices_but_by_waiting(
    url: str, photographs: Photographs
) -> None:
    (replica,) = named("ray::ServeReplica:default:Encoder")
    os.kill(replica, signal.SIGKILL)
    client = Client(url)
    with httpx.Client(timeout=120) as connection:
        for data, expected in photographs[:5]:
            response = client.send(connection, arguments_of(data, 2))
            assert response.status_code == 200, response.text
            (entry,) = response.json()["data"]
            np.testing.assert_allclose(embedding_of(entry), expected, rtol=0, atol=1e-5)
    assert set(client.statuses) <= {200, 503}


def test_one_yaml_starts_it(model: Path, tmp_path: Path, photographs: Photographs) -> None:
    """The example's own file, with another model and port."""
    settings = yaml.safe_load((ROOT / "examples" / "serve.yaml").read_text("utf-8"))
    port = free_port()
    settings["http_options"] = {"host": "127.0.0.1", "port": port}
    (application,) = settings["applications"]
    application["args"] |= {"model": str(model), "config": {"enabled": False}, "pooling": "mean"}
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

        def is_up() -> bool:
            assert server.poll() is None, (tmp_path / "log").read_text()
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(is_up)
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/embeddings", **arguments_of(data, 0), timeout=60
        ).json()
        pooled = expected.mean(axis=0, keepdims=True)
        np.testing.assert_allclose(
            embedding_of(answer["data"][0]), pooled / np.linalg.norm(pooled), rtol=0, atol=1e-5
        )
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
