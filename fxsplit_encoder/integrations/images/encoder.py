"""Prepared images to a batch on the tower's device, and embeddings back, without waiting for the device.

Both ways go through pinned memory. Who keeps two batches under way, one that the device works on and one that
the host fills or empties, keeps both busy: torch takes the same pinned memory again once a batch is through.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.integrations.images.preparer import (
    Array,
    ImageEncoderSettings,
    ImagePreparer,
    PreparedImage,
)
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.load import load_tower, read_family
from fxsplit_encoder.towers.inputs import PixelValues


def upload(images: Sequence[PreparedImage], values: PixelValues, device: torch.device) -> dict[str, Any]:
    """The tower's `mm_kwargs` of some images: pixels on the device, grids and counts on the host."""
    return {
        name: _upload([image.inputs[name] for image in images], values, device) for name in images[0].inputs
    }


def _upload(arrays: Sequence[Array], values: PixelValues, device: torch.device) -> Tensor:
    kind = arrays[0].dtype.kind
    if kind not in "fu":
        return torch.from_numpy(np.concatenate(arrays))
    rows = sum(len(array) for array in arrays)
    dtype = torch.uint8 if kind == "u" else torch.float32
    shape = rows, *arrays[0].shape[1:]
    host = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=host.numpy())
    pixels = host.to(device, non_blocking=True)
    return values(pixels) if kind == "u" else pixels


@dataclass(frozen=True)
class Download:
    """Embeddings on their way to the host."""

    rows: Tensor
    """(rows of all images, width), on the host."""
    counts: Sequence[int]
    """Rows of every image."""
    done: torch.cuda.Event | None
    """None: they are there."""

    @classmethod
    def start(cls, embeddings: Sequence[Tensor], dtype: torch.dtype) -> Download:
        """Begins to copy embeddings, (tokens, width) each."""
        joined = torch.cat(list(embeddings)).to(dtype)
        counts = [len(embedding) for embedding in embeddings]
        if not joined.is_cuda:
            return cls(joined, counts, None)
        host = torch.empty(joined.shape, dtype=dtype, device="cpu", pin_memory=True)
        host.copy_(joined, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(joined.device))
        return cls(host, counts, done)

    def wait(self) -> None:
        """Until they are there."""
        if self.done is not None:
            self.done.synchronize()

    def embeddings(self) -> list[Array]:
        """The embedding of every image, (tokens, width), once all of them are there."""
        self.wait()
        return np.split(self.rows.numpy(), np.cumsum(self.counts)[:-1])


logger = logging.getLogger(__name__)

Result = Array | InputError
"""An embedding, (tokens, width), or why an image has none."""

Launched = Download | InputError

# Batches: one that the device works on, and one that the host fills or empties.
_UNDER_WAY = 2

# Of pixels that are sent to the device at once, with another batch being encoded meanwhile.
_BATCH_BYTES = 64 << 20


class ImageEncoder:
    """Loads, compiles and captures; then encodes. All on the thread that calls, which has to be one.

    Args:
        settings: checkpoint, device, captures, and the form of embeddings.
        preparer: of the same checkpoint, where the caller has one.
        batch_bytes: of inputs that are given to the manager together, at most, but for one image that has
            more. Two such batches and their embeddings are in memory at once.

    Raises:
        InputError: the checkpoint or the device is not usable.
    """

    def __init__(
        self,
        settings: ImageEncoderSettings,
        preparer: ImagePreparer | None = None,
        batch_bytes: int = _BATCH_BYTES,
    ) -> None:
        self.settings = settings
        self.device = settings.resolved_device()
        self.dtype = settings.resolved_dtype(self.device)
        self.preparer = preparer or ImagePreparer(settings)
        self._values = PixelValues(self.preparer.values, self.dtype, self.device)
        self._batch_bytes = batch_bytes
        self._under_way: deque[Download] = deque()
        checkpoint = Checkpoint.locate(settings.model)
        tower = load_tower(checkpoint, self.dtype, self.device)
        wrapped = read_family(checkpoint)[0].wrap(tower)
        self.manager = fx.EncoderCudaGraphManager(wrapped, settings.resolved_config(self.device))
        self.manager.capture()
        for report in self.manager.reports:
            logger.warning("%s: %s", settings.model, report)

    def count_tokens(self, image: PreparedImage) -> int:
        """Rows of the image's output before pooling; nothing is encoded. From any thread.

        Raises:
            InputError: the tower does not take these inputs.
        """
        specs = self.manager.tower.get_encoder_cudagraph_item_specs(_host_inputs(image))
        return sum(spec.output_tokens for spec in specs)

    def encode(self, images: Sequence[PreparedImage]) -> list[Result]:
        """The embedding of every image, in order; for one that the tower refuses, or that alone does not fit
        in memory, the error.

        Raises:
            Exception: what else goes wrong concerns all of them.
        """
        return results_of(self.launch(images))

    def launch(self, images: Sequence[PreparedImage]) -> list[Launched]:
        """As `encode`, but on a GPU it returns before the last batches are encoded, so that the device has
        the next images before these are fetched. `results_of` fetches them, on any thread.
        """
        return [launched for batch in self._batches(images) for launched in self._launch(batch)]

    def _batches(self, images: Sequence[PreparedImage]) -> Iterator[Sequence[PreparedImage]]:
        start = size = 0
        for index, image in enumerate(images):
            if index > start and size + image.num_bytes > self._batch_bytes:
                yield images[start:index]
                start, size = index, 0
            size += image.num_bytes
        if images:
            yield images[start:]

    def _launch(self, images: Sequence[PreparedImage]) -> list[Launched]:
        while len(self._under_way) >= _UNDER_WAY:
            self._under_way.popleft().wait()
        try:
            embeddings = self.manager.execute(upload(images, self._values, self.device))
            assert len(embeddings) == len(images)
            download = Download.start([self._pooled(e) for e in embeddings], self._output_dtype)
        except (InputError, torch.OutOfMemoryError) as error:
            if len(images) > 1:
                half = len(images) // 2
                return self._launch(images[:half]) + self._launch(images[half:])
            return [error if isinstance(error, InputError) else InputError(f"out of memory: {error}")]
        self._under_way.append(download)
        return [download]

    def _pooled(self, embedding: Tensor) -> Tensor:
        if self.settings.pooling == "none":
            return embedding
        return embedding.mean(dim=0, keepdim=True, dtype=torch.float32)

    @property
    def _output_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.settings.output_dtype)
        return dtype


def results_of(launched: Sequence[Launched]) -> list[Result]:
    """What `ImageEncoder.launch` began, once it is there."""
    results: list[Result] = []
    for each in launched:
        results += each.embeddings() if isinstance(each, Download) else [each]
    return results


def _host_inputs(image: PreparedImage) -> dict[str, Any]:
    # Of pixels, which are refused as uint8, nothing is read but their shape.
    return {
        name: torch.from_numpy(array.copy())
        if array.dtype.kind == "i"
        else torch.zeros(1, dtype=torch.float32, device="cpu").expand(array.shape)
        for name, array in image.inputs.items()
    }
