"""Images that the encoder's device prepares: JPEG files decoded, pixels resized, normalized and cut.

To the bit what Pillow makes of the same pixels on the host. JPEG files are decoded by nvJPEG, by way of
torchvision, whose colors are not those of Pillow's decoder.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from torch import Tensor

from fxsplit_encoder._torch.staging import to_device
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.media import MediaSettings, pixels_of
from fxsplit_encoder.media.images import BICUBIC, OnHost, ResizePlan
from fxsplit_encoder.towers.inputs import PixelValues

_WEIGHT_BITS = 22
_MOST_AXES = 256
# Whoever made the item has looked at the file.
_ANY_SIZE = MediaSettings(max_bytes=1 << 40, max_pixels=1 << 40)


def prepared_pixels(
    sources: Sequence[Tensor],
    plans: Sequence[Any],
    values: PixelValues,
    device: torch.device,
    on_host: OnHost,
) -> Tensor:
    """Prepare images on a device, without waiting for it unless files are decoded.

    Args:
        sources: of each image its pixels (height, width, 3), or its JPEG file (bytes,); on the host.
        plans: `PIXEL_PLAN` of each image.
        values: of the model's normalization, on the device.
        on_host: counts files that only the host can decode.

    Raises:
        InputError: there is no decoder.
        MediaError: a file cannot be decoded.
    """
    decoded = iter(decode_jpegs([source for source in sources if source.ndim == 1], device, on_host))
    pieces = []
    for source, numbers in zip(sources, plans, strict=True):
        *plan, orientation = numbers.tolist()
        pixels = next(decoded) if source.ndim == 1 else to_device(source, device)
        pieces.append(_resized(_turned(pixels, orientation), ResizePlan(*plan), values))
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


# --- files

_FLIPS = {2: [1], 3: [0, 1], 4: [0], 6: [1], 7: [0, 1], 8: [0]}


def _turned(pixels: Tensor, orientation: int) -> Tensor:
    """Pixels (height, width, 3) upright."""
    upright = pixels.transpose(0, 1) if orientation >= 5 else pixels
    return upright.flip(_FLIPS[orientation]) if orientation in _FLIPS else upright


def check_decoder(devices: Collection[torch.device]) -> None:
    """Raises InputError unless this process can decode JPEG files on these devices, of which there is one:
    torchvision's decoder loses its memory whenever the device is another one.
    """
    is_there = importlib.util.find_spec("torchvision") is not None
    if not is_there or len({*devices}) != 1 or any(device.type != "cuda" for device in devices):
        got = ", ".join(map(str, devices))
        raise InputError(f"on_device: decode takes torchvision and one GPU a process; got {got}; use resize")


def decode_jpegs(files: Sequence[Tensor], device: torch.device, on_host: OnHost) -> list[Tensor]:
    """Decode JPEG files, (bytes,) on the host, to pixels (height, width, 3) on a device; where that fails the
    host decodes. MediaError: neither can.
    """
    if not files:
        return []
    check_decoder([device])
    io, stream = importlib.import_module("torchvision.io"), torch.cuda.current_stream(device)
    try:
        # The decoder writes at once, into memory that work which waits on this stream may have still to read.
        with torch.cuda.stream(_decoder_stream(device)):
            made = io.decode_jpeg(list(files), mode=io.ImageReadMode.RGB, device=device)
    except RuntimeError as error:
        if len(files) > 1:
            return [pixels for file in files for pixels in decode_jpegs([file], device, on_host)]
        on_host.add(f"torchvision: {error}".partition("\n")[0])
        return [to_device(torch.from_numpy(pixels_of(files[0].numpy().tobytes(), _ANY_SIZE).copy()), device)]
    for pixels in made:
        pixels.record_stream(stream)
    return [pixels.permute(1, 2, 0) for pixels in made]


@functools.cache
def _decoder_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# --- pixels


def _resized(pixels: Tensor, plan: ResizePlan, values: PixelValues) -> Tensor:
    """The patches of an image."""
    frames, side = max(plan.frames, 1), plan.side
    made = values.table.new_empty(plan.rows * plan.columns, 3, frames, side, side)
    second, first, is_turned = _axes(pixels.shape[0], pixels.shape[1], plan, pixels.device)
    turned = pixels.transpose(0, 1) if is_turned else pixels
    kernel = _kernel() if pixels.is_cuda else None
    if kernel is not None:
        with torch.cuda.device(pixels.device):
            kernel.resize(turned, second, first, values.table, made)
    else:
        resize(turned, second, first, values.table, made)
    return made.flatten(1) if plan.frames else made[:, :, 0]


@functools.cache
def _kernel() -> Any:
    found = importlib.util.find_spec("triton") is not None
    return importlib.import_module("fxsplit_encoder.kernels.resize") if found else None


def resize(pixels: Tensor, second: Tensor, first: Tensor, values: Tensor, out: Tensor) -> None:
    """Does what the kernel of that name in `kernels.resize` does, on any device."""
    numbers = pixels.permute(2, 0, 1)
    for axis in (first, second):
        total: Any = 1 << (_WEIGHT_BITS - 1)
        for tap, weight in enumerate(axis[2:]):
            entries = (axis[0] + tap).clamp(max=numbers.shape[2] - 1)
            total = total + numbers.index_select(2, entries).int() * weight
        numbers = (total >> _WEIGHT_BITS).clamp(0, 255).transpose(1, 2)
    places = second[1][:, None] + first[1]
    for channel in range(3):
        for frame in range(out.shape[2]):
            plane = (channel * out.shape[2] + frame) * out.shape[3] * out.shape[4]
            out.view(-1)[(places + plane).long()] = values[channel * 256 + numbers[channel]]


@functools.lru_cache(_MOST_AXES)
def _axes(height: int, width: int, plan: ResizePlan, device: torch.device) -> tuple[Tensor, Tensor, bool]:
    """The axes of `resize` for images of one size, and whether rows are resized before columns."""
    merge, patch = plan.merge, 3 * max(plan.frames, 1) * plan.side**2
    made = []
    for size, resized, count, whole, part, step in (
        (height, plan.height, plan.rows, merge * plan.columns, merge, plan.side),
        (width, plan.width, plan.columns, merge * merge, 1, 1),
    ):
        entries = np.arange(count * plan.side)
        number, inside = entries // plan.side, entries % plan.side
        places = (number // merge * whole + number % merge * part) * patch + inside * step
        begins, weights = _weights(size, resized, plan.filter)
        kept = entries + (resized - len(entries)) // 2
        axis = np.concatenate([begins[None, kept], places[None], weights[:, kept]]).astype(
            np.int32, order="C"
        )
        made.append(to_device(torch.from_numpy(axis), device))
    # Pillow's way from 13 on: what is resized first, and rounded, is what leaves least for the other.
    lost = height - plan.height
    rows_first = int(PIL.__version__.split(".")[0]) >= 13 and 0 < lost > 2 * (width - plan.width)
    return (made[1], made[0], True) if rows_first else (made[0], made[1], False)


def _weights(size: int, resized: int, filter: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The first pixel of each entry of a resized side, and the weights from there on, as in Pillow."""
    scale = size / resized
    stretch = max(scale, 1.0)
    reach = stretch * (2.0 if filter == BICUBIC else 1.0)
    centers = (np.arange(resized) + 0.5) * scale
    begins = np.maximum((centers - reach + 0.5).astype(int), 0)
    taps = np.minimum((centers + reach + 0.5).astype(int), size) - begins
    numbers = np.arange(taps.max())[:, None]
    x = np.abs((numbers + begins - centers + 0.5) * (1.0 / stretch))
    if filter == BICUBIC:
        near, far = (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
        weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    else:
        weights = np.where(x < 1, 1 - x, 0.0)
    weights = np.where(numbers < taps, weights, 0.0)
    weights /= weights.sum(axis=0)
    return begins, np.trunc(weights * (1 << _WEIGHT_BITS) + np.copysign(0.5, weights))
