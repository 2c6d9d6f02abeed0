"""Encodes items through an `EncoderCudaGraphManager`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxsplit_encoder._torch.staging import copy_on_host, to_device
from fxsplit_encoder.caching import Recent
from fxsplit_encoder.connector.interfaces import PIXEL_TABLE, FeatureEncoder, Modality, PreparedItem
from fxsplit_encoder.connector.pixels import prepared_pixels
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager import EncoderCudaGraphManager
from fxsplit_encoder.media.images import PIXEL_PLAN, OnHost
from fxsplit_encoder.messages import names_of
from fxsplit_encoder.towers.base import WrappedTower
from fxsplit_encoder.towers.inputs import PixelValues
from fxsplit_encoder.towers.packed import PackedTower

# Of a token, before anything is measured: items from before the capture are compared with later ones by it.
_MILLISECONDS_PER_TOKEN = 0.01

_KEPT_TABLES = 8

# What an item's inputs have besides the tower's.
_ADDED = (PIXEL_TABLE, PIXEL_PLAN)

# torch copies no more than that many elements without asking for OpenMP's threads.
_ONE_THREAD_ELEMENTS = 32_768


class ManagerEncoder(FeatureEncoder):
    """Encodes images and videos by one tower; None: of the modalities that it declares captures for."""

    def __init__(
        self,
        manager: EncoderCudaGraphManager,
        *,
        modalities: Sequence[Modality] | None = None,
    ) -> None:
        self.manager = manager
        self.device, self.dtype = manager.pool.device, manager.dtype
        self.stream_priority = manager.config.stream_priority
        self.on_host = OnHost()
        """Of JPEG files that the device could not decode."""
        self._tables: Recent[bytes, PixelValues] = Recent(_KEPT_TABLES)
        self._modalities = manager.model_config.modalities if modalities is None else modalities

    def start(self) -> None:
        """Capture every budget, on the thread that will replay them."""
        if not self.manager.is_captured():
            self.manager.capture()

    def predict_cost(self, item: PreparedItem) -> float:
        """Milliseconds, as the manager's plan predicts; a guess by tokens where it predicts none."""
        inputs = {n: t for n, t in item.inputs.items() if n not in _ADDED}
        if PIXEL_PLAN in item.inputs:  # its pixels are not yet what the tower takes
            inputs = {name: tensor for name, tensor in inputs.items() if tensor.dtype != torch.uint8}
        is_timed = self.manager.pool.is_cuda and self.manager.is_captured()
        predicted = self.manager.plan(inputs).milliseconds if is_timed else None
        return item.num_tokens * _MILLISECONDS_PER_TOKEN if predicted is None else predicted

    def stage(self, item: PreparedItem) -> PreparedItem:
        """Pixels in the tower's dtype and, for a GPU, in pinned memory: they are sent from there."""
        return replace(item, inputs={name: self._staged(name, item) for name in item.inputs})

    def _staged(self, name: str, item: PreparedItem) -> Tensor:
        tensor, is_pinned = item.inputs[name], self.manager.pool.is_cuda
        if name == PIXEL_TABLE:
            return tensor
        if tensor.is_floating_point():
            return staged(tensor, self.manager.dtype, is_pinned)
        is_pixels = PIXEL_TABLE in item.inputs and tensor.dtype == torch.uint8
        return staged(tensor, tensor.dtype, is_pinned) if is_pixels else tensor

    def slices(self, item: PreparedItem, most_cost: float) -> list[PreparedItem]:
        """Cut a video by frames, as evenly as its predicted cost asks for, if they are independent."""
        keys = _video_keys(self.manager.tower)
        if keys is None or {*item.inputs} - {PIXEL_TABLE} != {*keys}:
            return [item]
        pixels, grid = (item.inputs[key] for key in keys)
        num_frames = int(grid[0, 0]) if len(grid) == 1 else 1
        num_slices = min(num_frames, math.ceil(self.predict_cost(item) / most_cost))
        if num_slices <= 1 or len(pixels) % num_frames or item.num_tokens % num_frames:
            return [item]
        made, start = [], 0
        for number in range(num_slices):
            stop = num_frames * (number + 1) // num_slices
            rows, tokens = len(pixels) // num_frames, item.num_tokens // num_frames
            cut = grid.clone()
            cut[0, 0] = stop - start
            inputs = {**item.inputs, keys[0]: pixels[start * rows : stop * rows], keys[1]: cut}
            made.append(replace(item, inputs=inputs, num_tokens=(stop - start) * tokens))
            start = stop
        return made

    def row_bytes(self, modality: Modality) -> int | None:
        """Of the tower's output, if it encodes the modality."""
        if modality not in self._modalities:
            return None
        return self.manager.model_config.out_hidden_size * self.manager.dtype.itemsize

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        """Encode the items as one request; InputError: those of one modality have different inputs."""
        # A manager's items are its images, then its videos.
        order = sorted(range(len(items)), key=lambda index: items[index].modality == "video")
        try:
            rows = self.manager.execute(self._joined([items[index] for index in order]))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # so that the halves of the batch have the memory that it had
            raise
        outputs = dict(zip(order, rows, strict=True))
        return [outputs[index] for index in range(len(items))]

    def _joined(self, items: Sequence[PreparedItem]) -> dict[str, Any]:
        """The inputs of several items as one `mm_kwargs`."""
        for modality in {item.modality for item in items}:
            names = {frozenset(item.inputs) for item in items if item.modality == modality}
            if len(names) > 1:
                raise InputError(
                    f"{modality}: expected items of the same inputs; got {' and '.join(map(names_of, names))}"
                )
        keys = dict.fromkeys(name for item in items for name in item.inputs if name not in _ADDED)
        return {name: self._join(name, [item for item in items if name in item.inputs]) for name in keys}

    def _join(self, name: str, items: Sequence[PreparedItem]) -> Tensor | list[Tensor]:
        tensors = [item.inputs[name] for item in items]
        if tensors[0].dtype == torch.uint8 and PIXEL_TABLE in items[0].inputs:
            tensors = self._normalized(name, items)
        # Pixels are left in parts where the tower takes them so: joining would copy them once more.
        takes_parts = isinstance(self.manager.tower, WrappedTower) and tensors[0].is_floating_point()
        if len(tensors) == 1:
            return tensors[0]
        return tensors if takes_parts else torch.cat(tensors)

    def _normalized(self, name: str, items: Sequence[PreparedItem]) -> list[Tensor]:
        """Pixels on the device, neighbors with the same table in one piece."""
        pieces = []
        for table, group in groupby(items, key=_table_of):
            if PIXEL_PLAN in items[0].inputs:
                sources, plans = zip(*((i.inputs[name], i.inputs[PIXEL_PLAN]) for i in group), strict=True)
                device, values = self.manager.pool.device, self._values(table)
                pieces.append(prepared_pixels(sources, plans, values, device, self.on_host))
                continue
            sent = [to_device(item.inputs[name], self.manager.pool.device) for item in group]
            piece = torch.cat(sent) if len(sent) > 1 else sent[0]
            pieces.append(self._values(table)(piece) if table else piece)
        return pieces

    def _values(self, table: bytes) -> PixelValues:
        """On the device, what a table says; a processor has one for each modality."""
        found: PixelValues | None = self._tables.get(table)
        if found is None:
            values = np.frombuffer(table, np.float32).reshape(-1, 256).copy()
            found = PixelValues(values, self.manager.dtype, self.manager.pool.device)
            self._tables[table] = found
        return found

    def close(self) -> None:
        """Releases the captures; `start` makes them again."""
        self.manager.clear()


def _table_of(item: PreparedItem) -> bytes:
    table = item.inputs.get(PIXEL_TABLE)
    return b"" if table is None else table.numpy().tobytes()


def _video_keys(tower: object) -> tuple[str, str] | None:
    """Names of a tower's patches and grids of videos, if it encodes each of their frames alone."""
    if not isinstance(tower, PackedTower) or not tower.frames_are_independent:
        return None
    keys = [pair for pair in tower.input_keys if "video" in pair[1]]
    return keys[0] if keys else None


def staged(tensor: Tensor, dtype: torch.dtype, is_pinned: bool) -> Tensor:
    """Returns a host tensor in a dtype, and in pinned memory if asked for, by the calling thread alone."""
    if tensor.is_cuda or (tensor.dtype == dtype and (tensor.is_pinned() or not is_pinned)):
        return tensor
    target = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=is_pinned)
    flat, source = target.view(-1), tensor.detach().reshape(-1)
    for part in (slice(s, s + _ONE_THREAD_ELEMENTS) for s in range(0, flat.numel(), _ONE_THREAD_ELEMENTS)):
        copy_on_host(flat[part], source[part])
    return target
