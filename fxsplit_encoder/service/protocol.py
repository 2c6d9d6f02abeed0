"""Requests for embeddings as OpenAI's clients, Jina's, and forms have them; answers and errors as JSON."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_core import from_json
from python_multipart import multipart
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from fxsplit_encoder.messages import names_of, shown
from fxsplit_encoder.service.encoder import Array, Item, PreparedImage, decoded
from fxsplit_encoder.service.settings import ServiceSettings
from fxsplit_encoder.settings_model import problems_of

Source = bytes | str
"""An encoded image, or a text."""

# Of one JSON body: a value takes up to a hundred times its bytes.
_MOST_VALUES = 1 << 20
_MOST_FIELD_BYTES = 1 << 10
# No text begins so; of what kind the bytes are their decoder finds.
_IMAGE_URL = re.compile(r"\s*data:(image/|[^,\s]*;base64,)", re.IGNORECASE)
# Of a text; of what is longer than the model takes, the beginning is encoded.
MOST_CHARACTERS = 1 << 15


_KINDS = {
    400: "invalid_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    415: "unsupported_media_type",
    429: "overloaded",
    500: "internal",
    503: "unavailable",
}
_CLOSE, _RETRY = {"Connection": "close"}, {"Retry-After": "1"}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: _CLOSE, 413: _CLOSE, 429: _RETRY, 503: _RETRY}


class RequestError(HTTPException):
    """A request that is answered by an error, of the kind that its status has unless another is given."""

    def __init__(self, status: int, message: str, index: int | None = None, kind: str = "") -> None:
        super().__init__(status, message, _HEADERS.get(status))
        self.kind, self.index = kind or _KINDS[status], index

    def response(self) -> Response:
        """The error as JSON."""
        index = {} if self.index is None else {"index": self.index}
        error = {"type": self.kind, "message": self.detail, **index, "code": self.status_code}
        return JSONResponse({"error": error}, self.status_code, self.headers)


class EmbeddingRequest(BaseModel, frozen=True):
    """Items to encode, and the form of the answer."""

    input: list[Source]
    modality: Literal["text", "image"] = "text"
    """Of what is neither an object nor a data URL."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    model: str | None = None
    user: str | None = None

    @field_validator("dimensions", mode="before")
    @classmethod
    def _check_kind(cls, given: object) -> object:
        if isinstance(given, bool | float):  # of a form or the query it is a text
            raise ValueError("allowed: integers of at least 1")
        return given


_FIELDS = EmbeddingRequest.model_fields.keys()


def parse_request(
    headers: Mapping[str, str], query: str, body: bytes, settings: ServiceSettings
) -> EmbeddingRequest:
    """Read a request in one of three forms: JSON, multipart, or an image as it is; on any thread.

    Args:
        headers: by names in small letters.

    Raises:
        RequestError: it is malformed, or has more items than allowed.
    """
    kind, parameters = multipart.parse_options_header(headers.get("content-type", ""))
    given: Any
    if kind == b"multipart/form-data":
        given, fields = _read_form(body, parameters.get(b"boundary"), settings)
    elif kind == b"application/json":
        fields = _read_json(body)
        given = fields.pop("input", [])
    elif kind.startswith(b"image/") or kind == b"application/octet-stream":
        given, fields = body, {}
    else:
        expected = "multipart/form-data, application/json, image/* or application/octet-stream"
        got = kind.decode("latin-1") or "nothing"
        raise RequestError(415, f"expected {expected}; got {got}")
    fields = {**QueryParams(query), **fields}
    if unknown := sorted(fields.keys() - (_FIELDS - {"input"})):
        expected = ", ".join(sorted(_FIELDS - {*unknown}))  # without `input`, which is JSON's alone
        raise RequestError(400, f"expected {expected}; got {names_of(unknown)}")
    values = given if isinstance(given, list) else [given]
    if not 1 <= len(values) <= settings.max_items_per_request:  # before any is decoded
        limit = f"expected 1 to {settings.max_items_per_request} of them"
        raise RequestError(400, f"items: {limit}; got {len(values)}")
    items = []
    for index, value in enumerate(values):
        try:
            items.append(_item_of(value, fields.get("modality")))
        except ValueError as error:
            raise RequestError(400, str(error), index) from None
    try:
        asked = EmbeddingRequest(input=items, **fields)
    except ValidationError as error:
        raise RequestError(400, "; ".join(problems_of(error, [*_FIELDS]))) from None
    if asked.model not in (None, settings.name):
        message = f"model: expected {settings.name}; got {shown(asked.model)}"
        raise RequestError(404, message, kind="model_not_found")
    return asked


# --- JSON


def _read_json(body: bytes) -> dict[str, Any]:
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > _MOST_VALUES:
        raise RequestError(400, f"body: expected at most {_MOST_VALUES} values")
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(400, f"body: not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(400, f"body: expected a JSON object; got {shown(fields)}")
    return fields


def _item_of(value: object, modality: object) -> Source:
    """An image or a text of a body; ValueError: it is neither."""
    if isinstance(value, dict):
        if (names := sorted(value)) not in (["image"], ["text"]):
            raise ValueError(f"input: expected an object with image or text; got {names_of(names)}")
        modality, value = names[0], value[names[0]]
    elif isinstance(value, str) and _IMAGE_URL.match(value):
        modality = "image"
    if isinstance(value, bytes):
        return value
    if modality == "image":
        return decoded(value)
    if not isinstance(value, str):
        raise ValueError(f"input: expected a text, a data URL or an object; got {shown(value)}")
    if len(value) > MOST_CHARACTERS:
        raise ValueError(f"input: expected at most {MOST_CHARACTERS} characters; got {len(value)}")
    return value


# --- forms


def _read_form(
    body: bytes, boundary: bytes | None, settings: ServiceSettings
) -> tuple[list[bytes], dict[str, str]]:
    """The files of a form, and its fields."""
    files: list[bytes] = []
    fields: dict[str, str] = {}
    ends: list[None] = []  # the parser does not mind a form that is cut off

    def add_file(file: multipart.File) -> None:
        if len(files) >= settings.max_items_per_request:
            raise RequestError(
                400, f"multipart: Too many files; expected at most {settings.max_items_per_request}"
            )
        file.file_object.seek(0)
        files.append(file.file_object.read())

    def add_field(field: multipart.Field) -> None:
        value = field.value or b""
        if len(value) > _MOST_FIELD_BYTES or len(fields) > len(_FIELDS):
            raise RequestError(400, "multipart: expected few and short fields beside the files")
        fields[(field.field_name or b"").decode("utf-8", "replace")] = value.decode("utf-8", "replace")

    in_memory = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}
    try:
        parser = multipart.FormParser(
            "multipart/form-data", add_field, add_file, lambda: ends.append(None), boundary, config=in_memory
        )
        parser.write(body)
    except ValueError as error:
        raise RequestError(400, f"multipart: {error}") from None
    if not ends:
        raise RequestError(400, "multipart: expected the boundary of its end; it was cut off")
    return files, fields


# --- answers


def embeddings_response(
    asked: EmbeddingRequest,
    items: Sequence[Item],
    embeddings: Sequence[Array],
    tokens: int,
    model: str,
    is_normalized: bool,
) -> Response:
    """Write the embeddings of all items of a request, (rows, width), row by row, as float32, which is what
    OpenAI's clients make of base64; it is little-endian.

    Args:
        tokens: output tokens of all items before pooling.
        is_normalized: whether a shortened vector is normalized again.

    Raises:
        RequestError: more dimensions than there are, or of embeddings of several rows; NaN as JSON.
    """
    as_floats = (each.astype("<f4", copy=False) for each in embeddings)
    embeddings = [_shortened(each, asked.dimensions, is_normalized) for each in as_floats]
    is_base64 = asked.encoding_format == "base64"
    for index, embedding in enumerate(embeddings):
        if not is_base64 and not np.isfinite(embedding).all():
            raise RequestError(422, "got NaN or an infinity, which is no JSON", index, "unencodable_image")
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": b64encode(embedding.tobytes()).decode() if is_base64 else embedding.ravel().tolist(),
            "shape": list(embedding.shape),
            "dtype": str(embedding.dtype),
            **({"layout": item.layout} if isinstance(item, PreparedImage) else {}),
        }
        for index, (item, embedding) in enumerate(zip(items, embeddings, strict=True))
    ]
    images = sum(isinstance(item, PreparedImage) for item in items)
    rows = sum(len(embedding) for embedding in embeddings)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "images": images, "rows": rows}
    return JSONResponse({"object": "list", "model": model, "data": data, "usage": usage})


def _shortened(embedding: Array, dimensions: int | None, is_normalized: bool) -> Array:
    if dimensions is None:
        return embedding
    if len(embedding) != 1 or dimensions > embedding.shape[1]:
        given = f"{dimensions} of {' x '.join(map(str, embedding.shape))}"
        raise RequestError(400, f"dimensions: expected at most those of one vector; got {given}")
    cut = embedding[:, :dimensions]
    if is_normalized:
        cut = cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)
    return cut
