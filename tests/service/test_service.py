"""The service over HTTP: OpenAI's client, the models' own vectors, limits, faults, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fxsplit_encoder as fx
from fxsplit_encoder.cli.main import app
from fxsplit_encoder.errors import EncoderLostError, InputError, MediaError
from fxsplit_encoder.models.text import TextEncoder
from fxsplit_encoder.service import application, server
from fxsplit_encoder.service.encoder import Preparer, QueuedEncoder

from ..models.checkpoints import save
from ..models.embedding_models import WORDS, image_vector, save_model, text_vectors
from ..waiting import wait_until
from .photographs import EXAMPLES, blank, data_url, encoded, photograph, settings_of
from .serving import HOST, Running, answers, free_port, serving

TEXTS = ["a photo of a cat", "two cups of coffee", "rocket"]
PNG = {"content-type": "image/png"}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return save_model(tmp_path_factory.mktemp("siglip"), "Siglip")


@pytest.fixture(scope="module")
def running(siglip: tuple[Any, Path]) -> Iterator[Running]:
    limits = {"max_pixels": 1 << 20, "max_request_bytes": 200_000}
    with pytest.MonkeyPatch.context() as patch, serving(siglip[1], **limits) as running:
        patch.setattr(application, "BODY_TIMEOUT_S", 1.0)
        patch.setattr(server, "HEADER_TIMEOUT_S", 1.0)
        yield running


@pytest.fixture
def change(running: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Running]:
    def changed(**settings: Any) -> Running:
        app = running.service.application
        monkeypatch.setattr(app, "settings", app.settings.model_copy(update=settings))
        return running

    return changed


def expected_vectors(model: Any, directory: Path, images: list[bytes]) -> np.ndarray:
    preparer = Preparer(settings_of(directory))
    values = torch.from_numpy(preparer.values)
    rows = []
    for data in images:
        pixels = torch.from_numpy(preparer.load(data).inputs["pixel_values"]).long()
        normalized = torch.stack([values[channel][pixels[:, channel]] for channel in range(3)], dim=1)
        rows.append(image_vector(model, {"pixel_values": normalized}))
    return torch.cat(rows).numpy()


def unit(given: Any) -> np.ndarray:
    vectors = np.asarray(given)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_openais_client_gets_the_models_own_vectors(running: Running, siglip: tuple[Any, Path]) -> None:
    model, directory = siglip
    images = [encoded(photograph(size=(40 + n, 50))) for n in range(3)]
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        assert [each.id for each in client.models.list()] == ["tiny"]
        texts = client.embeddings.create(model="tiny", input=TEXTS)  # base64, which it asks for by itself
        found = client.embeddings.create(
            model="tiny", input=[*map(data_url, images)], encoding_format="float"
        )
        short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=4, user="me")
        with pytest.raises(openai.NotFoundError, match="expected tiny"):
            client.embeddings.create(model="gpt", input="a")
    np.testing.assert_allclose(
        [each.embedding for each in texts.data], unit(text_vectors(model, directory, TEXTS)), atol=1e-5
    )
    np.testing.assert_allclose(
        [each.embedding for each in found.data], unit(expected_vectors(model, directory, images)), atol=1e-5
    )
    cut = np.array([texts.data[0].embedding[:4]])
    np.testing.assert_allclose([short.data[0].embedding], unit(cut), atol=1e-5)
    assert texts.usage.total_tokens >= 3


def test_vectors_may_keep_their_length(siglip: tuple[Any, Path]) -> None:
    model, directory = siglip
    with serving(directory, normalize=False) as running:
        found = running.embed(json={"input": TEXTS}).json()["data"]
    expected = text_vectors(model, directory, TEXTS)
    np.testing.assert_allclose([each["embedding"] for each in found], expected, rtol=1e-4, atol=1e-4)


def test_other_towers_have_the_mean_of_their_rows(tmp_path: Path) -> None:
    _, directory = save(tmp_path / "checkpoint", "qwen2_5_vl")
    encoder = QueuedEncoder(settings_of(directory))
    data = encoded(photograph())
    (rows,) = encoder.encode([encoder.preparer.load(data)])
    assert isinstance(rows, np.ndarray)
    with serving(directory) as running:
        (entry,) = running.embed(content=data, headers=PNG).json()["data"]
        np.testing.assert_allclose([entry["embedding"]], unit(rows.mean(axis=0, keepdims=True)), atol=1e-5)
        refused = running.embed(json={"input": "a cat"})
        assert (refused.status_code, refused.json()["error"]["index"]) == (400, 0)
    with serving(directory, pooling="none") as running:
        (entry,) = running.embed(content=data, headers=PNG).json()["data"]
        np.testing.assert_allclose(np.reshape(entry["embedding"], entry["shape"]), rows, atol=1e-5)
    with pytest.raises(InputError, match="has no vector of its own"):
        Preparer(settings_of(directory, pooling="model"))


def test_health_readiness_metrics_and_other_paths(running: Running) -> None:
    url = running.url
    running.service.encoder.preparer.steps.on_host.add("PNG")
    assert running.embed(json={"input": "a cat"}).status_code == 200
    health = httpx.get(f"{url}/health").json()
    assert (health["status"], health["model"]) == ("ok", "tiny")
    assert httpx.head(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/ready").json() == {"status": "ready"}
    text = httpx.get(f"{url}/metrics").text
    for name in (
        'encoder_service_requests_total{status="200"}',
        'encoder_service_images_on_host_total{reason="PNG"} 1.0',
        "encoder_service_rows_total",
        "encoder_service_batch_images_bucket",
        "encoder_service_queue_waiting 0.0",
        "encoder_cudagraph_item_hits_total",
    ):
        assert name in text
    for method, path, status in (
        ("GET", "/v1/embeddings", 405),
        ("GET", "/nothing", 404),
        ("POST", "/health", 405),
    ):
        answer = httpx.request(method, url + path)
        assert (answer.status_code, "there are /v1/embeddings" in answer.json()["error"]["message"]) == (
            status,
            True,
        )


def test_a_key_is_asked_for(change: Callable[..., Running]) -> None:
    running = change(api_key="g\xe9heim")
    right, wrong = (f"Bearer {key}".encode() for key in ("g\xe9heim", "secret"))
    for headers in ({}, {"authorization": wrong}, {"authorization": right[7:]}):
        for method, path in (("POST", "/v1/embeddings"), ("GET", "/v1/models")):
            assert httpx.request(method, running.url + path, headers=headers).status_code == 401
    assert httpx.get(f"{running.url}/v1/models", headers={"authorization": right}).status_code == 200
    assert running.status_of("/health") == 200


# --- limits


HEAD = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: image/png\r\ncontent-length: 1000\r\n\r\n"


def test_connections_that_send_nothing_stop_nothing(running: Running) -> None:
    silent = [running.connect() for _ in range(32)]
    half = [running.connect(HEAD[:40]) for _ in range(32)]
    without_body = [running.connect(HEAD) for _ in range(64)]
    assert running.status_of("/health") == 200
    assert running.embed(json={"input": "a cat"}).status_code == 200
    for connection in without_body:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")
    for connection in (*silent, *half):
        assert connection.recv(1 << 16) == b""
    for connection in (*silent, *half, *without_body):
        connection.close()


def test_a_connection_that_was_used_is_closed_too(running: Running) -> None:
    connection = running.connect(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea")
    received = b""
    while piece := connection.recv(1 << 16):
        received += piece
    assert received.startswith(b"HTTP/1.1 200")
    connection.close()


def test_headers_without_an_end_are_cut_off(running: Running) -> None:
    connection = running.connect(b"GET /health HTTP/1.1\r\n")
    with pytest.raises(OSError):
        for _ in range(100_000):  # more than the buffers of both ends hold
            connection.sendall(b"x: " + b"y" * 1000 + b"\r\n")
    connection.close()
    assert running.status_of("/health") == 200


def test_too_many_pixels_are_refused_by_their_headers(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxsplit_encoder.models.prepare.load_image", None)
    data = blank(1024)
    answer = running.embed(files=[("image", (f"{n}.png", data)) for n in range(32)])
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["index"]) == (413, "too_large", 1)
    assert "max_pixels" in error["message"]


def test_bodies_are_limited_by_what_they_say_and_by_what_comes(running: Running) -> None:
    assert running.embed(content=bytes(200_001), headers=PNG).status_code == 413

    def pieces() -> Iterator[bytes]:
        for _ in range(300):
            yield bytes(1000)

    answer = running.embed(content=pieces(), headers=PNG)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "too_large")


def test_a_bad_image_is_refused_with_its_place_and_what_waits_beside_it_is_not_prepared(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[bytes] = []
    answered = threading.Event()

    def load(preparer: Preparer, data: bytes) -> Any:
        if data == images[0]:
            raise MediaError("of the test")
        prepared.append(data)
        answered.wait(1)

    monkeypatch.setattr(Preparer, "load", load)
    workers = application.thread_pool()._max_workers
    images = [blank(8 + n) for n in range(workers + 8)]
    try:
        answer = running.embed(files=[("image", (f"{n}.png", data)) for n, data in enumerate(images)])
    finally:
        answered.set()
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["index"]) == (422, "undecodable_image", 0)
    assert len(prepared) <= workers


class Held(NamedTuple):
    entered: threading.Event
    go_on: threading.Event


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Keeps the encoders of texts in their first batch until it is told."""
    held, encode = Held(threading.Event(), threading.Event()), TextEncoder.__call__

    def call(encoder: TextEncoder, texts: Any) -> Any:
        held.entered.set()
        assert held.go_on.wait(60)
        return encode(encoder, texts)

    monkeypatch.setattr(TextEncoder, "__call__", call)
    return held


def in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
    return ThreadPoolExecutor(1).submit(function, *arguments, **named)


def statuses(asked: Sequence[Future[httpx.Response]]) -> list[int]:
    return [each.result().status_code for each in asked]


def test_what_is_too_much_is_refused_and_may_come_again(held: Held, change: Callable[..., Running]) -> None:
    running = change(max_requests=2)
    asked = [in_thread(running.embed, json={"input": "a"}) for _ in range(2)]
    wait_until(lambda: running.service.application.num_requests == 2)
    refused = running.embed(json={"input": "a"})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["type"] == "overloaded"
    assert running.status_of("/health") == 200
    held.go_on.set()
    assert statuses(asked) == [200, 200]
    assert running.embed(json={"input": "a"}).status_code == 200


def test_what_no_encoder_takes_in_time_is_refused(held: Held, siglip: tuple[Any, Path]) -> None:
    with serving(siglip[1], request_timeout_s=0.2) as running:
        first = in_thread(running.embed, json={"input": "a"})
        held.entered.wait()
        late = running.embed(json={"input": "b"})
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        held.go_on.set()
        assert statuses([first]) == [200]


def test_a_client_that_goes_is_not_encoded(held: Held, running: Running) -> None:
    first = in_thread(running.embed, json={"input": "a"})
    held.entered.wait()
    body = json.dumps({"input": ["b"] * 3}).encode()
    head = HEAD.replace(b"image/png", b"application/json").replace(b"1000", str(len(body)).encode())
    connection = running.connect(head + body)
    queue = running.service.encoder.queue
    before = queue.stats().cancelled
    wait_until(lambda: queue.stats().waiting == 3)
    connection.close()
    wait_until(lambda: queue.stats().waiting == 0)
    assert queue.stats().cancelled == before + 3
    held.go_on.set()
    assert statuses([first]) == [200]


def test_one_item_that_fails_fails_its_request_alone(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = fx.EncoderCudaGraphManager.execute
    bad = encoded(Image.new("RGB", (28, 28), (255, 0, 0)))

    def refusing(self: fx.EncoderCudaGraphManager, inputs: dict[str, torch.Tensor]) -> Any:
        pixels = inputs["pixel_values"]
        if bool(((pixels[:, 0] == 1) & (pixels[:, 1] == -1)).flatten(1).all(1).any()):
            raise RuntimeError("of the test") if len(pixels) > 1 else InputError("of the test")
        return execute(self, inputs)

    monkeypatch.setattr(fx.EncoderCudaGraphManager, "execute", refusing)
    images = [encoded(photograph(size=(30 + n, 30))) for n in range(6)]
    sent = (*images[:3], bad, *images[3:])
    asked = [in_thread(running.embed, content=data, headers=PNG) for data in sent]
    assert statuses(asked) == [200] * 3 + [422] + [200] * 3


def test_a_service_whose_encoder_is_lost_says_so(
    siglip: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(siglip[1]) as running:
        monkeypatch.setattr(TextEncoder, "__call__", mock.Mock(side_effect=EncoderLostError("of the test")))
        answer = running.embed(json={"input": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        wait_until(lambda: running.status_of("/health") == 503)
        assert running.status_of("/ready") == 503


# --- its end, and its command


def test_requests_in_flight_are_answered_at_the_end(held: Held, siglip: tuple[Any, Path]) -> None:
    with serving(siglip[1]) as running:
        asked = [in_thread(running.embed, json={"input": "a"}) for _ in range(3)]
        wait_until(lambda: running.service.application.num_requests == 3)
        running.server.should_exit = True
        wait_until(lambda: running.service.application.is_draining)
        held.go_on.set()
        assert statuses(asked) == [200] * 3


def test_the_command_binds_this_machine_alone_and_warns_where_others_reach_it(
    siglip: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[str] = []
    monkeypatch.setattr(server.Service, "run", lambda self, host, port: bound.append(host))
    monkeypatch.setattr("fxsplit_encoder.cli.serve.freeze_objects", lambda: None)
    settings = tmp_path / "settings.yaml"
    settings.write_text("config:\n  enabled: false\n", encoding="utf-8")
    port = str(free_port())
    command = ["serve", str(siglip[1]), "--settings", str(settings), "--device", "cpu", "--port", port]
    warning = "may be reached by others, and no --api-key is set"
    everywhere = ["--host", "0.0.0.0"]
    for options, host, is_warned in (
        ([], "127.0.0.1", False),
        (everywhere, "0.0.0.0", True),
        ([*everywhere, "--api-key", "secret"], "0.0.0.0", False),
    ):
        done = CliRunner().invoke(app, [*command, *options])
        assert (bound.pop(), warning in done.stderr) == (host, is_warned), done.output
    with socket.create_server((HOST, int(port))):
        refused = CliRunner().invoke(app, ["serve", "nothing", "--port", port])
    assert refused.exit_code == 2 and f"--port {port}: " in refused.stderr and "in use" in refused.stderr


def first_page() -> tuple[list[str], str]:
    """The commands of docs/serve.md that come first, and its code."""
    page = (ROOT / "docs" / "serve.md").read_text("utf-8")
    (commands, *_), (code, *_) = (
        re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("sh", "python")
    )
    return commands.splitlines(), code


@contextlib.contextmanager
def command_of_first_page(directory: Path, place: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Its command with another checkpoint and a key, once it is ready, and its URL."""
    (install, command), _ = first_page()
    assert install.startswith("pip install '.[serve")
    _, *words, name = shlex.split(command)
    port, settings, log = free_port(), place / "settings.yaml", place / "log"
    settings.write_text(f"served_name: {name}\nconfig:\n  enabled: false\n", encoding="utf-8")
    program = [sys.executable, "-m", "fxsplit_encoder.cli.main", *words, str(directory), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ENCODER_CG_API_KEY": "none"}  # the page's key
    with log.open("w") as file:
        options = ["--settings", str(settings), "--device", "cpu"]
        server = subprocess.Popen([*program, *options], stdout=file, stderr=file, env=environment)
    url = f"http://{HOST}:{port}"

    try:
        wait_until(lambda: answers(f"{url}/ready", server, log))
        yield server, url
        assert server.wait(60) in (0, -signal.SIGTERM), log.read_text()
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_the_command_serves_the_first_page_and_drains_at_sigterm(
    siglip: tuple[Any, Path], tmp_path: Path
) -> None:
    images = [data_url(encoded(photograph(size=(400 + n, 400)))) for n in range(20)]
    key, ending = {"authorization": "Bearer none"}, threading.Event()

    def ask_until_the_end() -> list[int]:
        found = []
        while not ending.is_set():
            with httpx.Client(timeout=60) as client:  # a connection each, none of them reset
                answer = client.post(f"{url}/v1/embeddings", json={"input": images}, headers=key)
            found.append(answer.status_code)
        return found

    def requests() -> int:
        return int(httpx.get(f"{url}/health").json()["requests"])

    with command_of_first_page(siglip[1], tmp_path) as (server, url):
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}).status_code == 401
        script = tmp_path / "search.py"
        script.write_text(first_page()[1].replace("http://127.0.0.1:8000", url), encoding="utf-8")
        found = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=True)
        assert "coffee" in WORDS  # else all texts are the same to the model
        assert Path(found.stdout.strip()).name in {path.name for path in EXAMPLES.iterdir()}

        asked = [in_thread(ask_until_the_end) for _ in range(4)]
        wait_until(requests)
        ending.set()
        # A connection that the server has not accepted yet may be reset: each of these is accepted.
        wait_until(lambda: requests() == sum(not each.done() for each in asked))
        server.send_signal(signal.SIGTERM)
        assert {status for each in asked for status in each.result()} == {200}


def test_several_devices_share_a_queue(siglip: tuple[Any, Path]) -> None:
    encoder = QueuedEncoder(settings_of(siglip[1], pooling="model"), ["cpu", "cpu"])
    encoder.wait_started()
    images = [encoder.first.preparer.prepare(photograph(size=(30 + n, 40))) for n in range(12)]
    found = encoder.encode(images)
    alone = [encoder.encode([image])[0] for image in images]
    np.testing.assert_allclose(found, alone, atol=1e-6)
    encoder.close()
