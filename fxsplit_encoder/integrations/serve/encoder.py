"""The replica that holds the tower: images of many requests become batches of the token budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from ray import serve

from fxsplit_encoder.integrations.images import ImageEncoder, PreparedImage, Result, results_of
from fxsplit_encoder.integrations.serve.merging import Fetch, Launch, MergingThread
from fxsplit_encoder.integrations.serve.metrics import EncoderMetrics
from fxsplit_encoder.integrations.serve.settings import ServiceSettings

_IMAGES_WITHOUT_BUDGET = 16


@dataclass(frozen=True, eq=False)
class _Waiting:
    image: PreparedImage
    weight: int
    """Its output tokens; of one that is larger than a batch, those of a batch."""


class EncoderReplica:
    """One tower, one GPU, one thread that encodes.

    Args:
        settings: of the service.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._metrics = EncoderMetrics()
        self._broken: str | None = None
        self._thread = MergingThread(self._start, lambda: self._max_tokens, self._note_failure)
        # Ray's queue forms batches as images come, the thread joins those that wait for it.
        self._batched = serve.batch(
            max_batch_size=self._max_tokens,
            batch_wait_timeout_s=settings.batch_wait_s,
            max_concurrent_batches=settings.max_ongoing_requests,
            batch_size_fn=total_weight,
        )(self._encode_batch)

    async def encode(self, images: Sequence[PreparedImage]) -> list[Result]:
        """The embeddings of a request's images, in order; of one that cannot be encoded, the error."""
        weights = [min(self._encoder.count_tokens(image), self._max_tokens) for image in images]
        waiting = [_Waiting(image, weight) for image, weight in zip(images, weights, strict=True)]
        return list(await asyncio.gather(*map(self._batched, waiting)))

    async def describe(self) -> dict[str, Any]:
        """What encodes here."""
        return {
            "device": str(self._encoder.device),
            "dtype": str(self._encoder.dtype).removeprefix("torch."),
            "max_batch_tokens": self._max_tokens,
            "items": self._encoder.manager.stats().items,
        }

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises."""
        if self._broken is not None or not self._thread.is_alive:
            raise RuntimeError(f"the encoder cannot go on: {self._broken or 'its thread has ended'}")

    async def _encode_batch(self, waiting: list[_Waiting]) -> list[Result]:
        future = self._thread.submit([each.image for each in waiting], total_weight(waiting))
        return await asyncio.wrap_future(future)

    # --- on the thread

    def _start(self) -> Launch:
        self._encoder = ImageEncoder(self._settings)
        self._max_tokens = self._settings.max_batch_tokens or _largest_budget(self._encoder)
        return self._launch

    def _launch(self, images: Sequence[PreparedImage]) -> Fetch:
        begin = time.perf_counter()
        launched = self._encoder.launch(images)

        def fetch() -> list[Result]:
            results = results_of(launched)
            self._metrics.add_batch(results, time.perf_counter() - begin, self._encoder.manager.stats())
            return results

        return fetch

    def _note_failure(self, error: Exception) -> None:
        if self._encoder.device.type == "cuda":
            try:
                torch.cuda.synchronize(self._encoder.device)
            except RuntimeError:
                self._broken = f"{type(error).__name__}: {error}"


def total_weight(waiting: Sequence[_Waiting]) -> int:
    """Output tokens of a batch."""
    return sum(each.weight for each in waiting)


def _largest_budget(encoder: ImageEncoder) -> int:
    budgets = [budget for path in encoder.manager.budget_graphs.values() for budget in path]
    if budgets:
        return max(budgets)
    image = encoder.preparer.prepare(Image.new("RGB", (448, 448)))
    return _IMAGES_WITHOUT_BUDGET * encoder.count_tokens(image)
