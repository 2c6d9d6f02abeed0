"""What a client gets: embeddings in one of three forms, or an error that says what to change."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from fxsplit_encoder.integrations.images import PreparedImage
from fxsplit_encoder.integrations.images.preparer import Array


class RequestError(Exception):
    """A request that is answered by an error.

    Args:
        status: of HTTP.
        kind: of the error, for programs.
        message: for people.
        index: of the image that it concerns.
    """

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
