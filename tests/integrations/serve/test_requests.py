"""Bodies in three forms, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.requests import Request

from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.integrations.images import PreparedImage, Result
from fxsplit_encoder.integrations.serve.encoder import Fetch, MergingThread
from fxsplit_encoder.integrations.serve.requests import (
    EmbeddingRequest,
    RequestError,
    ServiceSettings,
    read_request,
)

SETTINGS = ServiceSettings(model="m", max_request_bytes=4000, max_images_per_request=3)


def read(sent: httpx.Request, pieces: int = 3, declared: bool = True) -> EmbeddingRequest:
    """What a request is read as whose body comes in pieces."""
    body = sent.read()
    size = len(body) // pieces + 1
    chunks = [body[start : start + size] for start in range(0, len(body), size)] or [b""]
    events = [
        {"type": "http.request", "body": chunk, "more_body": n < len(chunks) - 1}
        for n, chunk in enumerate(chunks)
    ]

    async def receive() -> dict[str, Any]:
        return events.pop(0)

    headers = [(k.lower(), v) for k, v in sent.headers.raw if declared or k.lower() != b"content-length"]
    scope = {
        "type": "http",
        "method": sent.method,
        "path": sent.url.path,
        "query_string": sent.url.query,
        "headers": headers,
    }
    return asyncio.run(read_request(Request(scope, receive), SETTINGS))


def post(url: str = "http://h/v1/embeddings", **arguments: Any) -> httpx.Request:
    return httpx.Request("POST", url, **arguments)


def form(images: Sequence[bytes], **fields: str) -> httpx.Request:
    return post(files=[("image", (f"{n}.png", data)) for n, data in enumerate(images)], data=fields)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_images_come_as_a_form_as_json_or_as_they_are() -> None:
    images = [b"one\0", b"\xfftwo"]
    assert read(form(images)) == EmbeddingRequest(images, "float")
    assert read(form(images, encoding_format="base64")).encoding == "base64"
    assert read(post(json={"images": [b64(i) for i in images], "encoding_format": "base64"})) == (
        EmbeddingRequest(images, "base64")
    )
    assert read(post(json={"image": f"data:image/png;base64,{b64(images[0])}"})).images == images[:1]
    raw = post("http://h/?encoding_format=npy", content=images[1], headers={"content-type": "image/png"})
    assert read(raw) == EmbeddingRequest(images[1:], "npy")
    accepting = {"content-type": "application/octet-stream", "accept": "application/x-npy"}
    assert read(post(content=images[1], headers=accepting)).encoding == "npy"


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (post(content=b"x"), 415, "expected multipart/form-data"),
        (post(content=b"x", headers={"content-type": "text/plain"}), 415, "text/plain"),
        (post(json=[1]), 400, "expected a JSON object"),
        (post(content=b"{", headers={"content-type": "application/json"}), 400, "not valid JSON"),
        (post(content=b"\xff{", headers={"content-type": "application/json"}), 400, "not valid JSON"),
        (post(content=b"[" * 3900, headers={"content-type": "application/json"}), 400, "JSON"),
        (post(json={"images": "abcd"}), 400, "expected a list"),
        (post(json={"images": ["no base64!"]}), 400, "expected base64"),
        (post(json={"images": [7]}), 400, "expected base64"),
        (post(json={"image": "", "images": []}), 400, "got both"),
        (post(json={"images": []}), 400, "1 to 3 of them; got 0"),
        (post(json={"images": [b64(b"a")] * 4}), 400, "got 4"),
        (post(json={"image": b64(b"a"), "dimensions": 3}), 400, "got dimensions"),
        (post(json={"image": b64(b"a"), "encoding_format": "hex"}), 400, "encoding_format: expected one of"),
        (post(json={"images": [b64(b"a")] * 2, "encoding_format": "npy"}), 400, "npy holds one"),
        (form([b"a"] * 4), 400, "Too many files"),
        (form([b"a"], user="me"), 400, "got user"),
        (post(content=b"x", headers={"content-type": "multipart/form-data"}), 400, "boundary"),
        (post(content=b"x", headers={"content-type": "multipart/form-data; boundary=q"}), 400, "multipart"),
        (form([bytes(4000)]), 413, "4000 bytes, the limit max_request_bytes"),
    ],
)
def test_what_is_wrong_is_said(sent: httpx.Request, status: int, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(sent)
    assert caught.value.status == status
    assert message in caught.value.message


@pytest.mark.parametrize("sent", [form([bytes(5000)]), post(json={"image": b64(bytes(5000))})])
def test_a_body_that_does_not_say_how_long_it_is_is_cut_off(sent: httpx.Request) -> None:
    with pytest.raises(RequestError) as caught:
        read(sent, pieces=10, declared=False)
    assert caught.value.status == 413


def test_settings_may_be_text_of_a_command_line() -> None:
    settings = ServiceSettings(model="m", encoders="2", max_request_bytes="20MiB", retry_after_s="3")
    assert (settings.encoders, settings.max_request_bytes, settings.retry_after_s) == (2, 20 << 20, 3)
    for wrong in ({"encoders": 0}, {"max_request_bytes": "much"}, {"refusal_status": 500}, {"colour": 1}):
        with pytest.raises(ConfigError):
            ServiceSettings(**{"model": "m", **wrong})


def test_json_of_an_error_says_which_image() -> None:
    from fxsplit_encoder.integrations.serve.requests import error_response

    response = error_response(RequestError(422, "undecodable_image", "no", 3), {"Retry-After": "1"})
    assert response.status_code == 422
    assert response.headers["retry-after"] == "1"
    assert json.loads(response.body) == {"error": {"type": "undecodable_image", "message": "no", "index": 3}}


def image(number: int) -> PreparedImage:
    return PreparedImage({"number": np.array([number])}, {})


def number_of(image: PreparedImage) -> int:
    return int(image.inputs["number"][0])


class Encoder:
    """Encodes a number as itself, and waits where it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def launch(self, images: Sequence[PreparedImage]) -> Fetch:
        self.threads.add(threading.current_thread().name)
        numbers = [number_of(image) for image in images]
        self.batches.append(numbers)
        self.entered.set()
        self.gate.wait()
        if -1 in numbers:
            raise RuntimeError("of the test")

        def fetch() -> list[Result]:
            if -2 in numbers:
                raise RuntimeError("later")
            return [np.array([n]) for n in numbers]

        return fetch


def held(encoder: Encoder, *on_failure: Callable[[Any], None]) -> tuple[MergingThread, Callable[[], None]]:
    """A thread that is busy with a first call, and what lets it go on."""
    thread = MergingThread(lambda: encoder.launch, lambda: 10, *on_failure)
    encoder.gate.clear()
    thread.submit([image(100)], 1)
    encoder.entered.wait()
    return thread, encoder.gate.set


def test_calls_that_wait_are_encoded_together_up_to_the_limit() -> None:
    encoder = Encoder()
    thread, go_on = held(encoder)
    calls = [thread.submit([image(n), image(n + 1)], 4) for n in (0, 2, 4, 6)]
    large = thread.submit([image(8)], 99)
    last = thread.submit([image(9)], 1)
    go_on()
    results = [[int(r[0]) for r in call.result()] for call in (*calls, large, last)]
    assert results == [[0, 1], [2, 3], [4, 5], [6, 7], [8], [9]]
    assert encoder.batches == [[100], [0, 1, 2, 3], [4, 5, 6, 7], [8], [9]]
    assert len(encoder.threads) == 1
    thread.close()
    assert not thread.is_alive


def test_a_call_that_was_cancelled_is_left_out() -> None:
    encoder = Encoder()
    thread, go_on = held(encoder)
    calls = [thread.submit([image(n)], 1) for n in range(3)]
    assert calls[1].cancel()
    go_on()
    assert [int(calls[n].result()[0][0]) for n in (0, 2)] == [0, 2]
    with pytest.raises(CancelledError):
        calls[1].result()
    assert encoder.batches[1] == [0, 2]
    thread.close()


def test_who_caused_an_error_is_the_only_one_who_gets_it() -> None:
    encoder, failures = Encoder(), []
    thread, go_on = held(encoder, failures.append)
    calls = [thread.submit([image(n)], 1) for n in (0, -1, 2)]
    go_on()
    assert [int(calls[n].result()[0][0]) for n in (0, 2)] == [0, 2]
    with pytest.raises(RuntimeError, match="of the test"):
        calls[1].result()
    with pytest.raises(RuntimeError, match="later"):
        thread.submit([image(-2)], 1).result()
    assert [str(error) for error in failures] == ["of the test", "later"]
    assert int(thread.submit([image(3)], 1).result()[0][0]) == 3
    thread.close()


def test_an_encoder_that_cannot_start_says_so() -> None:
    def start() -> Callable[[Sequence[PreparedImage]], Fetch]:
        raise ValueError("no checkpoint")

    with pytest.raises(ValueError, match="no checkpoint"):
        MergingThread(start, lambda: 10)


def test_what_was_submitted_before_the_end_is_done() -> None:
    encoder = Encoder()
    thread, go_on = held(encoder)
    calls = [thread.submit([image(n)], 6) for n in range(4)]
    closing = threading.Thread(target=thread.close)
    closing.start()
    go_on()
    closing.join()
    assert [int(call.result()[0][0]) for call in calls] == [0, 1, 2, 3]
