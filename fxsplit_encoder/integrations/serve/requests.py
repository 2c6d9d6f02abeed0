"""The service's settings, requests of images over HTTP, and their answers: embeddings or errors."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import BeforeValidator, Field
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from fxsplit_encoder.integrations.images import PreparedImage, ServingSettings
from fxsplit_encoder.integrations.images.preparer import Array
from fxsplit_encoder.messages import names_of, shown
from fxsplit_encoder.settings_model import Bytes, parse_bytes

# A command line gives numbers as text.
_Number = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(ge=0)]


class ServiceSettings(ServingSettings):
    """The arguments of the application. Immutable.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed.
    """

    max_request_bytes: Annotated[Bytes, BeforeValidator(parse_bytes)] = 1 << 25
    """Of a request's body, as an integer or a size such as 20MiB. A larger one is refused as it arrives."""

    max_images_per_request: _Number = 32
    """Images that one request may hold."""

    encoders: _Number = 1
    """Processes that hold the tower."""

    gpus_per_encoder: Annotated[float, Field(ge=0)] | None = None
    """None: one, if the cluster has any and `device` is not cpu."""

    frontends: _Number = 1
    """Processes that take requests, decode and prepare: about a CPU each."""

    max_batch_tokens: _Number | None = None
    """Output tokens of the images that are encoded together. None: the largest budget of the encoder, or
    without captures 16 images."""

    batch_wait_s: _Seconds = 0.002
    """How long a batch waits for more images while the encoder is idle."""

    max_ongoing_requests: _Number = 64
    """Requests that a front end works on at once."""

    max_queued_requests: _Number = 256
    """Requests that wait for a front end; others are refused."""

    refusal_status: Literal[429, 503] = 503
    """The status of a refusal under overload."""

    retry_after_s: _Number = 1
    """Seconds after which who is refused shall ask again."""


class RequestError(Exception):
    """A request that is answered by an error."""

    def __init__(self, status: int, kind: str, message: str, index: int | None = None) -> None:
        super().__init__(status, kind, message, index)
        self.status = status
        self.kind = kind
        self.message = message
        self.index = index


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """An error as JSON."""
    content: dict[str, Any] = {"type": error.kind, "message": error.message}
    if error.index is not None:
        content["index"] = error.index
    return json_response({"error": content}, error.status, headers)


def json_response(
    content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON object."""
    body = json.dumps(content, separators=(",", ":"))
    return Response(body, status, dict(headers or {}), "application/json")


def embeddings_response(
    model: str, encoding: str, images: Sequence[PreparedImage], embeddings: Sequence[Array]
) -> Response:
    """The embeddings of all images of a request.

    Args:
        model: that made them.
        encoding: float: a list of numbers; base64: of the little-endian values; npy: the array alone.
        images: what was encoded.
        embeddings: (tokens, width), row by row in both of the first.
    """
    if encoding == "npy":
        stream = io.BytesIO()
        np.save(stream, embeddings[0])
        return Response(stream.getvalue(), 200, media_type="application/x-npy")
    data = [
        {
            "object": "embedding",
            "index": index,
            "shape": list(embedding.shape),
            "dtype": str(embedding.dtype),
            "layout": image.layout,
            "embedding": _encoded(embedding, encoding),
        }
        for index, (image, embedding) in enumerate(zip(images, embeddings, strict=True))
    ]
    usage = {"images": len(images), "rows": sum(len(embedding) for embedding in embeddings)}
    return json_response({"object": "list", "model": model, "data": data, "usage": usage})


def _encoded(embedding: Array, encoding: str) -> object:
    if encoding == "float":
        return embedding.reshape(-1).tolist()
    little = embedding.astype(embedding.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(little.tobytes()).decode("ascii")


Encoding = Literal["float", "base64", "npy"]

_NPY = "application/x-npy"
_ALLOWED = {"image", "images", "encoding_format"}


@dataclass(frozen=True)
class EmbeddingRequest:
    """Encoded images, and the form of the answer."""

    images: list[bytes]
    encoding: Encoding


async def read_request(request: Request, settings: ServiceSettings) -> EmbeddingRequest:
    """The images of a request: parts of `multipart/form-data`, base64 in JSON, or an image as the body.

    Raises:
        RequestError: it is malformed, or beyond a limit.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        images, fields = await _read_form(request, settings)
    elif kind == "application/json":
        images, fields = _read_json(await _read_body(request, settings))
    elif kind.startswith("image/") or kind == "application/octet-stream":
        images, fields = [await _read_body(request, settings)], {}
    else:
        expected = "expected multipart/form-data, application/json or image/*"
        raise RequestError(415, "unsupported_media_type", f"Content-Type: {expected}; got {shown(kind)}")
    if not 1 <= len(images) <= settings.max_images_per_request:
        limit = f"expected 1 to {settings.max_images_per_request}"
        raise RequestError(400, "invalid_request", f"images: {limit} of them; got {len(images)}")
    return EmbeddingRequest(images, _encoding(request, fields, len(images)))


def _encoding(request: Request, fields: dict[str, Any], num_images: int) -> Encoding:
    named = fields.get("encoding_format") or request.query_params.get("encoding_format")
    if named is None:
        named = "npy" if _NPY in request.headers.get("accept", "") else "float"
    if named not in get_args(Encoding):
        expected = ", ".join(get_args(Encoding))
        raise RequestError(
            400, "invalid_request", f"encoding_format: expected one of {expected}; got {shown(named)}"
        )
    if named == "npy" and num_images > 1:
        raise RequestError(400, "invalid_request", f"npy holds one embedding; got {num_images} images")
    encoding: Encoding = named
    return encoding


# --- forms


async def _read_form(request: Request, settings: ServiceSettings) -> tuple[list[bytes], dict[str, Any]]:
    parser = MultiPartParser(
        request.headers,
        _limited(request, settings),
        max_files=settings.max_images_per_request,
        max_fields=len(_ALLOWED),
        max_part_size=1 << 10,
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:  # the latter: no boundary is given
        message = getattr(error, "message", "Content-Type: expected a boundary")
        raise RequestError(400, "invalid_request", f"multipart: {message}") from None
    try:
        given = form.multi_items()
        images = [await value.read() for _, value in given if not isinstance(value, str)]
        fields = {name: value for name, value in given if isinstance(value, str)}
    finally:
        await form.close()
    _check_names(fields)
    return images, fields


def _read_json(body: bytes) -> tuple[list[bytes], dict[str, Any]]:
    try:
        fields = json.loads(body)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise RequestError(400, "invalid_request", f"body: not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(400, "invalid_request", f"body: expected a JSON object; got {shown(fields)}")
    _check_names(fields)
    if "image" in fields and "images" in fields:
        raise RequestError(400, "invalid_request", "expected image or images; got both")
    given = [fields["image"]] if "image" in fields else fields.get("images", [])
    if not isinstance(given, list):
        raise RequestError(400, "invalid_request", f"images: expected a list; got {shown(given)}")
    return [_from_base64(index, text) for index, text in enumerate(given)], fields


def _from_base64(index: int, text: object) -> bytes:
    if isinstance(text, str):
        data = text.partition(",")[2] if text.startswith("data:") else text
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            pass
    raise RequestError(400, "invalid_request", "image: expected base64, or a data URL of it", index)


def _check_names(fields: dict[str, Any]) -> None:
    if unknown := sorted(fields.keys() - _ALLOWED):
        expected = ", ".join(sorted(_ALLOWED))
        raise RequestError(400, "invalid_request", f"expected {expected}; got {names_of(unknown)}")


# --- bodies


async def _read_body(request: Request, settings: ServiceSettings) -> bytes:
    return b"".join([chunk async for chunk in _limited(request, settings)])


async def _limited(request: Request, settings: ServiceSettings) -> AsyncIterator[bytes]:
    """The body as it arrives, up to the limit, by what it says it has or else by what came."""
    declared = request.headers.get("content-length", "0")
    size = int(declared) if declared.isdecimal() else 0
    received = 0
    _check_size(size, settings)
    async for chunk in request.stream():
        received += len(chunk)
        _check_size(received, settings)
        yield chunk


def _check_size(size: int, settings: ServiceSettings) -> None:
    if size > settings.max_request_bytes:
        limit = f"expected at most {settings.max_request_bytes} bytes, the limit max_request_bytes"
        raise RequestError(413, "too_large", f"body: {limit}; got {size} or more")
