"""Bodies in three forms, what OpenAI's and Jina's clients send, and what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.service.encoder import PreparedImage
from fxsplit_encoder.service.protocol import (
    MOST_CHARACTERS,
    EmbeddingRequest,
    RequestError,
    embeddings_response,
    parse_request,
)
from fxsplit_encoder.service.settings import ServiceSettings

from .photographs import b64, data_url

SETTINGS = ServiceSettings(model="m", max_items_per_request=3)
JSON = {"content-type": "application/json"}


def asked(items: Sequence[bytes | str], **fields: Any) -> EmbeddingRequest:
    return EmbeddingRequest(input=items, **fields)


def read(sent: httpx.Request) -> EmbeddingRequest:
    return parse_request(dict(sent.headers), sent.url.query.decode(), sent.read(), SETTINGS)


def post(url: str = "http://h/v1/embeddings", **arguments: Any) -> httpx.Request:
    return httpx.Request("POST", url, **arguments)


def form(images: Sequence[bytes], **fields: str) -> httpx.Request:
    return post(files=[("image", (f"{n}.png", data)) for n, data in enumerate(images)], data=fields)


def cut_off(images: Sequence[bytes], size: int) -> httpx.Request:
    whole = form(images)
    return post(content=whole.read()[:-size], headers={"content-type": whole.headers["content-type"]})


def nameless() -> httpx.Request:
    """A form whose part does not say which field it is."""
    headers = {"content-type": "multipart/form-data; boundary=q"}
    return post(content=b"--q\r\nX: y\r\n\r\nz\r\n--q--\r\n", headers=headers)


def test_images_come_as_a_form_as_json_or_as_they_are() -> None:
    images = [b"one\0", b"\xfftwo"]
    assert read(form(images)) == asked(images)
    assert read(form(images, encoding_format="base64")) == asked(images, encoding_format="base64")
    sent = [{"image": b64(image)} for image in images]
    assert read(post(json={"input": sent, "encoding_format": "base64"})) == asked(
        images, encoding_format="base64"
    )
    raw = post("http://h/?encoding_format=base64", content=images[1], headers={"content-type": "image/png"})
    assert read(raw) == asked(images[1:], encoding_format="base64")
    assert (
        read(post(content=images[1], headers={"content-type": "application/octet-stream"})).input
        == images[1:]
    )


def test_texts_and_images_come_as_openais_and_jinas_clients_send_them() -> None:
    image = b"\x89PNG"
    url = data_url(image)
    assert read(post(json={"model": "m", "input": "a cat", "user": "me", "dimensions": 8})) == (
        asked(["a cat"], model="m", dimensions=8, user="me")
    )
    assert read(post(json={"input": ["a cat", url], "user": None})).input == ["a cat", image]
    other_urls = [url.replace(*each) for each in (("data", " DATA"), ("image", "IMAGE"), ("image/png", ""))]
    assert read(post(json={"input": other_urls})).input == [image] * 3
    assert read(post(json={"input": "data: a, b"})).input == ["data: a, b"]
    objects = [{"text": "a cat"}, {"image": b64(image)}, {"image": url}]
    assert read(post(json={"input": objects})).input == ["a cat", image, image]
    assert read(post(json={"input": {"text": "https://h/cat.png"}})).input == ["https://h/cat.png"]
    assert read(post(json={"input": [url], "modality": "image"})).input == [image]
    assert read(form([image], dimensions="7", user="me")) == asked([image], dimensions=7, user="me")


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (post(content=b"x", headers={"content-type": "text/plain"}), 415, "text/plain"),
        (post(json=[1]), 400, "expected a JSON object"),
        (post(content=b"{", headers=JSON), 400, "not valid JSON"),
        (post(content=b"\xff{", headers=JSON), 400, "not valid JSON"),
        (post(content=b"[" * 3900, headers=JSON), 400, "JSON"),
        (post(content=b'{"dimensions": ' + b"9" * 5000 + b"}", headers=JSON), 400, "not valid JSON"),
        (post(content=b'{"dimensions": NaN}', headers=JSON), 400, "not valid JSON"),
        (post(content=b"[" + b"0," * (1 << 20) + b"0]", headers=JSON), 400, "values"),
        (post(json={"input": {"image": "no base64!"}}), 400, "expected base64"),
        (post(json={"input": {"image": "https://h/cat.png"}}), 400, "fetch what a URL names"),
        (post(json={"input": [1, 2]}), 400, "expected a text"),
        (post(json={"input": [{"image": "", "text": ""}]}), 400, "an object with image or text"),
        (post(json={"input": "x" * (MOST_CHARACTERS + 1)}), 400, "at most 32768 characters"),
        (post(content=b'{"input": "\\ud800"}', headers=JSON), 400, "hex escape"),
        (post(json={"input": "a", "modality": "audio"}), 400, "modality"),
        (post(json={"input": []}), 400, "1 to 3 of them; got 0"),
        (post(json={"input": ["a"] * 4}), 400, "got 4"),
        (post(json={"input": "a", "dimension": 3}), 400, "got dimension"),
        (post(json={"input": "a", "dimensions": 0}), 400, "dimensions: allowed: "),
        (post(json={"input": "a", "dimensions": True}), 400, "dimensions: allowed: "),
        (post(json={"input": "a", "user": 7}), 400, "user: allowed: "),
        (post(json={"input": "a", "model": "gpt"}), 404, "model: expected m; got 'gpt'"),
        (post(json={"input": "a", "encoding_format": "hex"}), 400, "encoding_format: allowed: 'float'"),
        (form([b"a"] * 4), 400, "Too many files"),
        (form([b"a"], color="me"), 400, "got color"),
        (form([b"a"], input="me"), 400, "encoding_format, modality, model, user; got input"),
        (form([b"a"], user="m" * 5000), 400, "short fields"),
        (nameless(), 400, "multipart: "),
        (cut_off([b"a" * 100, b"b" * 100], 60), 400, "cut off"),
        (post(content=b"x", headers={"content-type": "multipart/form-data"}), 400, "boundary"),
        (post(content=b"x", headers={"content-type": "multipart/form-data; boundary=q"}), 400, "multipart"),
    ],
)
def test_what_is_wrong_is_said(sent: httpx.Request, status: int, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(sent)
    assert caught.value.status_code == status
    assert message in caught.value.detail


def test_settings_may_be_text_of_a_command_line() -> None:
    settings = ServiceSettings(model="m", max_requests="2", max_request_bytes="20MiB", request_timeout_s="3")
    assert (settings.max_requests, settings.max_request_bytes, settings.request_timeout_s) == (2, 20 << 20, 3)
    wrong = {"max_requests": 0}, {"max_request_bytes": "much"}, {"max_request_bytes": "2GiB"}, {"colour": 1}
    wrong += {"request_timeout_s": "inf"}, {"pooling": "max"}, {"api_key": ""}, {"model": ""}
    for each in (*wrong, {"config": {"mode": "fast"}}):
        with pytest.raises(ConfigError):
            ServiceSettings(**{"model": "m", **each})


def answer(request: EmbeddingRequest, *embeddings: np.ndarray, is_normalized: bool = True) -> dict[str, Any]:
    items = [PreparedImage({}, {"tiles": 1}), (1,)][: len(embeddings)]
    made = embeddings_response(request, items, embeddings, 5, "m", is_normalized)
    found: dict[str, Any] = json.loads(made.body)
    return found


def test_an_answer_has_what_openais_clients_read() -> None:
    vector = np.array([[3, 0, 4]], np.float32)
    found = answer(asked([b"", ""]), vector, 2 * vector)
    assert (found["object"], found["model"]) == ("list", "m")
    assert found["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "images": 1, "rows": 2}
    assert [each["index"] for each in found["data"]] == [0, 1]
    assert [each["embedding"] for each in found["data"]] == [[3, 0, 4], [6, 0, 8]]
    assert [each.get("layout") for each in found["data"]] == [{"tiles": 1}, None]
    (entry,) = answer(asked([b""], encoding_format="base64"), vector)["data"]
    assert np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").tolist() == [3, 0, 4]


def test_a_vector_may_be_cut_and_has_length_1_again() -> None:
    vector = np.array([[3, 4, 12]], np.float32)
    (entry,) = answer(asked([b""], dimensions=2), vector)["data"]
    np.testing.assert_allclose(entry["embedding"], [0.6, 0.8])
    (entry,) = answer(asked([b""], dimensions=2), vector, is_normalized=False)["data"]
    assert entry["embedding"] == [3, 4]
    for wrong in (vector[:, :1], np.concatenate([vector, vector])):
        with pytest.raises(RequestError, match="dimensions"):
            answer(asked([b""], dimensions=2), wrong)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_no_json_is_refused_with_its_place(value: float) -> None:
    vectors = np.ones((1, 2), np.float32), np.array([[1, value]], np.float16)
    with pytest.raises(RequestError, match="got NaN or an infinity") as caught:
        answer(asked([b"", ""]), *vectors)
    assert (caught.value.status_code, caught.value.index) == (422, 1)
    entries = answer(asked([b"", ""], encoding_format="base64"), *vectors)["data"]
    found = np.frombuffer(base64.b64decode(entries[1]["embedding"]), "<f4")  # as OpenAI's clients read it
    np.testing.assert_array_equal(found, vectors[1][0])


def test_an_item_that_is_wrong_is_refused_with_its_place() -> None:
    with pytest.raises(RequestError, match="expected base64") as caught:
        read(post(json={"input": ["a", {"image": "no base64!"}]}))
    assert caught.value.index == 1
