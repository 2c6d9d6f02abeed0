"""Images and texts to embeddings: inputs on the host, batches on a device, encoders on a queue."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

import fxsplit_encoder as fx
from fxsplit_encoder.connector.pixels import check_decoder, prepared_pixels
from fxsplit_encoder.encode_queue.queue import EncodeQueue
from fxsplit_encoder.errors import EncoderLostError, InputError, MediaError
from fxsplit_encoder.media import MediaSettings
from fxsplit_encoder.media.images import PIXEL_PLAN, OnHost
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.load import device_of, dtype_of, load_tower, read_family
from fxsplit_encoder.models.media import pixel_table
from fxsplit_encoder.models.prepare import ImageSteps
from fxsplit_encoder.models.text import TextEncoder, Tokenizer, Tokens
from fxsplit_encoder.service.settings import ImageEncoderSettings, Pooling
from fxsplit_encoder.towers.inputs import PixelValues

logger = logging.getLogger(__name__)

Array = NDArray[Any]

Result = Array | Exception
"""An embedding, (rows, width), or why an item has none."""

MANY_BUDGETS = 4
"""Budgets of a batch of items that are there anyway: a manager packs several better than one by one."""

_PROBE = (448, 448)
_IMAGES_WITHOUT_BUDGET = 16
_MOST_TEXTS = 64


@dataclass(frozen=True)
class PreparedImage:
    """One image as the tower takes it, on the host."""

    inputs: Mapping[str, Array]
    """The tower's arguments: pixels of uint8, which `Preparer.values` normalizes, or of floats, which are
    normalized already; grids and counts as integers."""
    layout: Mapping[str, Any]
    """How the image was cut: "grid", "tiles" or "crops"."""


Item = PreparedImage | Tokens
Observe = Callable[[Sequence[Array], float], None]


class Preparer:
    """Prepares images and texts for a checkpoint's towers, whose weights it does not read; InputError: it has
    none that is known, or not the vector that the settings ask for.
    """

    def __init__(self, settings: ImageEncoderSettings) -> None:
        self.limits = MediaSettings(max_bytes=settings.max_image_bytes, max_pixels=settings.max_pixels)
        self.checkpoint = Checkpoint.locate(settings.model)
        self.family, config = read_family(self.checkpoint)
        if settings.pooling == "model" and self.family.pooled is None:
            raise InputError(f"pooling: {settings.model} has no vector of its own; use mean or none")
        default: Pooling = "mean" if self.family.pooled is None else "model"
        self.pooling = settings.pooling or (default if settings.pools_by_default else "none")
        unit = settings.pools_by_default and self.pooling != "none"
        self.normalizes = unit if settings.normalize is None else settings.normalize
        """Whether embeddings have length 1."""

        processors = self.checkpoint.processors().on(settings.on_device)
        whole = self.family.prepare(config, processors)
        later = self.family.prepare(config, processors.normalizing_later())
        self.values = pixel_table(whole, later, "image", settings.on_device)
        """(channels, 256): what the encoder makes of each value of each channel of uint8; None: that is not
        what the model's processor does, whose floats are prepared."""
        self._preparation = whole if self.values is None else later
        self.steps = ImageSteps(settings.on_device, normalizes=self.values is not None)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None: it has none, no text tower, or another pooling than its own."""
        files = (self.checkpoint.find(name) for name in ("tokenizer.json", "tokenizer_config.json"))
        takes_text = self.family.text is not None and self.pooling == "model"
        return Tokenizer(self.checkpoint) if takes_text and any(files) else None

    def load(self, media: bytes | memoryview | Array) -> PreparedImage:
        """Prepare the first image of a file, or pixels of uint8, (height, width) or with 1, 3 or 4 channels;
        MediaError: it cannot be decoded or prepared, or is beyond a limit.
        """
        return self.prepared_by(self.steps, media)

    def prepare(self, image: Image.Image) -> PreparedImage:
        """An upright RGB image, cut by the host; MediaError: it cannot be prepared, such as one that is too
        elongated.
        """
        return self.prepared_by(ImageSteps("normalize"), None, image)

    def prepared_by(
        self, steps: ImageSteps, media: object, loaded: Image.Image | None = None
    ) -> PreparedImage:
        """See `load` and `prepare`; by `steps` that are counted elsewhere."""
        try:
            made = steps.image(self._preparation, self.limits, media, loaded)
        except MediaError:
            raise
        except (InputError, ValueError) as error:  # transformers' processors raise the latter
            raise MediaError(str(error)) from None
        inputs = {name: tensor.numpy() for name, tensor in made.tensors.items()}
        if self.values is not None:  # some processors lay whole numbers out as floats
            inputs = {name: a.astype(np.uint8) if a.dtype.kind == "f" else a for name, a in inputs.items()}
        return PreparedImage(inputs, made.layout)


@cache
def thread_pool() -> ThreadPoolExecutor:
    """Threads of this process for parsing, decoding and writing: one a CPU."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "decoder")


def decoded(text: object) -> bytes:
    """The bytes of base64, or of a `data:` URL of it; MediaError: it is something else."""
    if isinstance(text, str):
        before, _, data = text.strip().rpartition(",")
        with contextlib.suppress(ValueError):
            if re.fullmatch(r"(data:[^,]*;base64)?", before, re.IGNORECASE):
                return base64.b64decode(data, validate=True)
    raise MediaError("image: expected base64, or a data URL of it; fetch what a URL names, and send it")


def upload(
    images: Sequence[PreparedImage], values: PixelValues | None, device: torch.device, on_host: OnHost
) -> dict[str, Tensor]:
    """The tower's `mm_kwargs` of some images: pixels on the device, grids and counts on the host."""
    made = {}
    plans = [image.inputs[PIXEL_PLAN] for image in images if PIXEL_PLAN in image.inputs]
    for name, first in images[0].inputs.items():
        arrays = [image.inputs[name] for image in images]
        if name == PIXEL_PLAN:
            continue
        if values is not None and plans and first.dtype == np.uint8:
            sources = [torch.from_numpy(np.require(array, requirements="W")) for array in arrays]
            made[name] = prepared_pixels(sources, plans, values, device, on_host)
            continue
        if first.dtype.kind == "i":
            made[name] = torch.from_numpy(np.concatenate(arrays))
            continue
        shape = sum(map(len, arrays)), *first.shape[1:]
        dtype = torch.float32 if values is None else torch.uint8
        host = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
        np.concatenate(arrays, out=host.numpy())
        pixels = host.to(device, non_blocking=True)
        made[name] = pixels if values is None else values(pixels)
    return made


class Launched:
    """A batch that the device works on, and whose embeddings, of so many rows each, it copies to the host."""

    def __init__(
        self, rows: Tensor, counts: list[int], dtype: torch.dtype, observe: Observe, begin: float
    ) -> None:
        self._host = rows.to(dtype).to("cpu", non_blocking=True)  # from a GPU into pinned memory
        self._done = torch.cuda.current_stream(rows.device).record_event() if rows.is_cuda else None
        self._counts, self._observe, self._begin = counts, observe, begin

    def wait(self) -> list[Array]:
        """The embedding of every item, in order."""
        if self._done is not None:
            self._done.synchronize()
        embeddings = [rows.numpy() for rows in torch.split(self._host, self._counts)]
        self._observe(embeddings, time.perf_counter() - self._begin)
        return embeddings


class ImageEncoder:
    """Loads a tower; then captures and encodes, on one thread; calls `observe` with the embeddings of each
    batch and its seconds. InputError: checkpoint or device is not usable.
    """

    def __init__(self, settings: ImageEncoderSettings, preparer: Preparer, observe: Observe) -> None:
        self.settings, self.preparer, self._observe = settings, preparer, observe
        self.device = device_of(settings.device)
        self.dtype = dtype_of(settings.dtype, self.device)
        own = preparer.family.pooled if preparer.pooling == "model" else preparer.family
        assert own is not None
        self._trims = own.pads_rows
        values = preparer.values
        self.values = None if values is None else PixelValues(values, self.dtype, self.device)
        probe = preparer.prepare(Image.new("RGB", _PROBE))
        side = None if own.spec is None else probe.inputs["pixel_values"].shape[-1]
        tower = own.wrap(load_tower(preparer.checkpoint, self.dtype, self.device, own), side)
        self.manager = fx.EncoderCudaGraphManager(tower, settings.resolved_config(self.device))
        self.texts: TextEncoder | None = None
        if (tokenizer := preparer.tokenizer) is not None:
            self.texts = TextEncoder(preparer.checkpoint, self.dtype, self.device, tokenizer.padding_id)
        all_planned = self.manager.planned_captures().captures
        planned = [each.key.budget for each in all_planned if each.pruned is None]
        self.max_batch_tokens = max(planned, default=_IMAGES_WITHOUT_BUDGET * self.count_tokens(probe))
        """Output tokens of the largest capture, or without captures of some images."""

    def start(self) -> None:
        """Capture, on the thread that will encode."""
        if not self.manager.is_captured():
            self.manager.capture()
        if self.values is not None and self.settings.on_device != "normalize":
            file = io.BytesIO()  # so that no request waits for a decoder, or for a kernel that is compiled
            Image.new("RGB", (8, 8)).save(file, "JPEG")
            probe = self.preparer.prepared_by(ImageSteps(self.settings.on_device), file.getvalue())
            upload([probe], self.values, self.device, OnHost())
        for report in self.manager.reports:
            logger.warning("%s: %s", self.settings.model, report)

    def count_tokens(self, item: Item) -> int:
        """Rows of an item's output before pooling, by its inputs' shapes; from any thread. InputError: the
        tower does not take these.
        """
        if not isinstance(item, PreparedImage):
            return max(1, self.max_batch_tokens // _MOST_TEXTS)
        inputs = {n: a for n, a in item.inputs.items() if a.dtype.kind == "i" and n != PIXEL_PLAN}
        specs = self.manager.tower.get_encoder_cudagraph_item_specs(inputs)
        return sum(spec.output_tokens for spec in specs)

    def launch(self, items: Sequence[Item]) -> Launched:
        """Begin to encode a batch; on a GPU it returns before the device is done, which so has the next batch
        before the last one is fetched.

        Raises:
            InputError: an item is refused; of a single one, that it does not fit in memory too.
            OutOfMemoryError: several items do not fit in memory together.
        """
        images = [item for item in items if isinstance(item, PreparedImage)]
        texts = [item for item in items if not isinstance(item, PreparedImage)]
        begin = time.perf_counter()
        try:
            of_images = iter(self._encode_images(images) if images else ())
            of_texts = iter(torch.split(self.texts(texts), 1) if texts and self.texts is not None else ())
            rows = [next(of_images if isinstance(item, PreparedImage) else of_texts) for item in items]
            joined = torch.cat(rows)
            if self.preparer.normalizes:
                joined = normalize(joined.float(), dim=-1)
            dtype = getattr(torch, self.settings.output_dtype)
            return Launched(joined, [*map(len, rows)], dtype, self._observe, begin)
        except torch.OutOfMemoryError as error:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # so that halves of the batch have the memory that it had
            if len(items) > 1:
                raise
            raise InputError(f"out of memory: {error}") from error

    def _encode_images(self, images: Sequence[PreparedImage]) -> Sequence[Tensor]:
        rows = self.manager.execute(upload(images, self.values, self.device, self.preparer.steps.on_host))
        assert len(rows) == len(images)
        if self._trims:
            rows = [each[: int(np.prod(i.layout["grid"]))] for each, i in zip(rows, images, strict=True)]
        if self.preparer.pooling == "mean":
            rows = [each.mean(dim=0, keepdim=True, dtype=torch.float32) for each in rows]
        return rows


class QueuedEncoder:
    """Encoders, one a device (None: that of the settings), behind an `EncodeQueue`; raises as `ImageEncoder`.
    A batch has the output tokens of `budgets_per_batch` largest captures, at most.
    """

    def __init__(
        self,
        settings: ImageEncoderSettings,
        devices: Sequence[str] | None = None,
        *,
        budgets_per_batch: int = 1,
        observe: Observe = lambda embeddings, seconds: None,
    ) -> None:
        devices = devices or [settings.device]
        if settings.on_device == "decode":
            check_decoder([*map(device_of, devices)])
        self.preparer = Preparer(settings)
        self.encoders = [
            ImageEncoder(settings.model_copy(update={"device": device}), self.preparer, observe)
            for device in devices
        ]
        self.first = self.encoders[0]
        self.max_batch_tokens = budgets_per_batch * self.first.max_batch_tokens
        self.queue: EncodeQueue[Item, Array] = EncodeQueue(self.max_batch_tokens)
        self.started = [
            self.queue.add_worker(each.launch, each.start, each.manager.clear) for each in self.encoders
        ]

    def wait_started(self) -> None:
        """Return once every encoder has captured; raises what one of them raised."""
        for started in self.started:
            started.result()

    async def is_ready(self) -> bool:
        """Whether an encoder has captured, and takes items; EncoderLostError: all are lost."""
        if not self.queue.is_alive:
            raise EncoderLostError("the encoder is lost; see the log")
        return any(started.done() for started in self.started)

    async def answer(self, items: Sequence[Item], tenant: str, timeout_s: float) -> tuple[list[Result], int]:
        """Encode a request's items, in whatever batches; return embeddings or errors, in order, and output
        tokens before pooling. Cancelling it cancels the items that wait. Raises as `EncodeQueue.submit`.
        """
        counting = thread_pool().submit(lambda: [*map(self.first.count_tokens, items)])
        counts = await asyncio.wrap_future(counting)
        futures = [
            self.queue.submit(item, tokens, tenant=tenant, timeout_s=timeout_s)
            for item, tokens in zip(items, counts, strict=True)
        ]
        landed: list[Any] = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        return landed, sum(counts)

    def encode(self, items: Sequence[Item]) -> list[Result]:
        """Encode items in batches that depend on them alone, and so do their last bits; an InputError takes
        the place of an embedding.
        """
        batches: list[list[Item]] = []
        room = 0
        for item, tokens in zip(items, map(self.first.count_tokens, items), strict=True):
            if not batches or tokens > room:
                batches.append([])
                room = self.max_batch_tokens
            batches[-1].append(item)
            room -= tokens
        futures = [future for batch in batches for future in self.queue.submit_batch(batch)]
        return [
            error if isinstance(error := future.exception(), InputError) else future.result()
            for future in futures
        ]

    def close(self, timeout_s: float | None = None) -> None:
        """End the encoders once all that was submitted is encoded."""
        self.queue.close(timeout_s=timeout_s)
