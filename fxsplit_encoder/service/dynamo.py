"""NVIDIA Dynamo's custom vision encoder, in a worker of vLLM; needs `dynamo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from dynamo.vllm.multimodal_utils.custom_encoder import (
    Preprocessed,
    Qwen3VLImageEncoding,
    VisionEncoderBackend,
)
from PIL import Image
from torch import Tensor

from fxsplit_encoder.errors import ConfigError, InputError, MediaError
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.service.encoder import MANY_BUDGETS, PreparedImage, Preparer, QueuedEncoder, decoded
from fxsplit_encoder.service.settings import ServingSettings

_GRID = "image_grid_thw"
# Language models to which Dynamo hands embeddings with their grids, to place them by. Others get rows alone.
_TAKE_GRIDS = {
    f"{name}ForConditionalGeneration" for name in ("Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")
}


class DynamoVisionEncoder(VisionEncoderBackend):  # type: ignore[misc]  # Dynamo's class, not installed here
    """The class for `--custom-encoder-class`, as it is or as a base of one that sets these attributes.

    Dynamo joins all images that wait, or up to `max_batch_cost` output tokens, and the manager packs them.
    """

    settings: ClassVar[Mapping[str, Any]] = {}
    """Fields of `ServingSettings`; `model` is the model that Dynamo serves unless it is given."""

    image_token_id: int | None = None
    """The token that stands for an image in prompts. Language models without images of their own need it."""

    preprocess_concurrency = 4
    """Threads that decode and prepare images."""

    def __init__(self) -> None:
        self._encoder: QueuedEncoder | None = None
        self._takes_grids = False
        self._resolved = self._settings_for("served")  # wrong ones are refused before anything is loaded

    @property
    def buckets(self) -> Sequence[int] | None:
        """Output tokens of every capture, ascending; before `build` those of the settings. None: there are
        none, or several paths have a ladder each.
        """
        if self._encoder is None:
            config = self._resolved.config
            return (config and config.token_budgets) or None
        ladders = list(self._encoder.first.manager.budget_graphs.values())
        return (sorted(ladders[0]) or None) if len(ladders) == 1 else None

    def build(self, model_id: str) -> None:
        """Load the tower, compile and capture, on the queue's thread, which will encode; InputError: the
        checkpoint or the device is not usable, or the tower has not the grids it needs.
        """
        served = Checkpoint.locate(model_id).read_json("config.json") or {}
        self._takes_grids = bool(_TAKE_GRIDS.intersection(served.get("architectures") or ()))
        self._resolved = self._settings_for(model_id)
        probe = Preparer(self._resolved).prepare(Image.new("RGB", (448, 448)))
        if self._takes_grids and _GRID not in probe.inputs:
            raise InputError(
                f"model: expected a tower with grids, as {model_id} has; got {self._resolved.model}"
            )
        encoder = QueuedEncoder(self._resolved, budgets_per_batch=MANY_BUDGETS)
        encoder.wait_started()
        self._encoder = encoder

    def fetch(self, url: str) -> bytes:
        """Read an image, on any thread; MediaError: no base64 within the limit. Override for other URLs."""
        if len(url) // 4 * 3 > self._resolved.max_image_bytes + 2:
            raise MediaError(f"image: expected at most {self._resolved.max_image_bytes} bytes")
        return decoded(url)

    def preprocess(self, raw: str) -> Preprocessed:
        """Prepare the image of a URL, on any thread; InputError: it cannot be encoded, its sender's fault."""
        image = self._built().preparer.load(self.fetch(raw))
        return Preprocessed(item=image, cost=self._built().first.count_tokens(image))

    def forward_batch(
        self, items: Sequence[PreparedImage], target_bucket: int | None = None
    ) -> list[Tensor | Qwen3VLImageEncoding]:
        """Encode what `preprocess` made, to (output tokens, hidden) on the host, in the tower's dtype.

        Args:
            target_bucket: one of `buckets`, or None; either way the manager chooses among its captures.

        Raises:
            RuntimeError: an image does not fit in memory, or no such bucket. All requests of the batch fail.
        """
        encoder = self._built()
        if target_bucket is not None and target_bucket not in (self.buckets or ()):
            raise RuntimeError(f"target_bucket: expected one of {self.buckets}; got {target_bucket}")
        artifacts = []
        for item, result in zip(items, encoder.encode(items), strict=True):
            if isinstance(result, InputError):  # a ValueError would blame the senders of all the others too
                raise RuntimeError(f"an image of the batch was not encoded: {result}") from result
            rows = torch.from_numpy(result).to(encoder.first.dtype)
            grid = tuple(item.inputs[_GRID][0].tolist()) if self._takes_grids else None
            artifacts.append(rows if grid is None else Qwen3VLImageEncoding(embeddings=rows, grid_thw=grid))
        return artifacts

    def close(self) -> None:
        """Releases captures and weights."""
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None

    def _built(self) -> QueuedEncoder:
        if self._encoder is None:
            raise RuntimeError("the encoder is not built, or closed")
        return self._encoder

    def _settings_for(self, model_id: str) -> ServingSettings:
        settings = ServingSettings(**{"model": model_id, **self.settings})
        if settings.output_dtype != "float32":
            raise ConfigError("output_dtype: leave it out; embeddings have the tower's dtype, set by `dtype`")
        return settings
