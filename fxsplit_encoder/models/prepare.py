"""Images and clips to the inputs of a tower: what every family's way has in common."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fxsplit_encoder.errors import InputError, MediaError
from fxsplit_encoder.media import AnimatedImage, Frames, MediaSettings, load_image, measure_image
from fxsplit_encoder.media.images import PIXEL_PLAN, OnHost, ResizePlan, jpeg_orientation, opened_image
from fxsplit_encoder.media.sources import attempt
from fxsplit_encoder.models.sampling import Sampling

# Of one's own files: Pillow's limit of pixels holds before this one.
_LIMITS = MediaSettings(max_bytes=1 << 32, max_pixels=1 << 30)

# With these a processor leaves pixels as they are.
_LATER = {"do_rescale": False, "do_normalize": False}

_EXTENSIONS = (".apng", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


OnDevice = Literal["normalize", "resize", "decode"]
"""The first step of preparing an image that its encoder's device does, which does those after it too."""


@dataclass(frozen=True)
class ProcessorSettings:
    """Settings of a checkpoint's image and video processors, from their JSON files."""

    image: Mapping[str, Any] = field(default_factory=dict)
    video: Mapping[str, Any] = field(default_factory=dict)
    own: Any = None
    """The checkpoint's own image processor, as `AutoImageProcessor` makes it; None: it cannot."""
    on_device: OnDevice = "normalize"
    """Where pixels are normalized later: the first step of preparing images that is left."""

    def on(self, first: OnDevice) -> ProcessorSettings:
        """The same for a device that does the steps from `first` on, as Pillow does them."""
        return replace(self, on_device=first)

    def image_processor(self, model: str, name: str, **settings: Any) -> Any:
        """This one, or else transformers' of a model, without torchvision."""
        if self.own is not None:
            return self.own
        module = importlib.import_module(f"transformers.models.{model}.image_processing_pil_{model}")
        return getattr(module, f"{name}ImageProcessorPil")(**settings)

    def normalizing_later(self) -> ProcessorSettings:
        """The same, but for pixels, which stay as they are: see `Normalization.is_later`."""
        return ProcessorSettings({**self.image, **_LATER}, {**self.video, **_LATER})


@dataclass(frozen=True)
class Prepared:
    """One item's inputs."""

    tensors: Mapping[str, Tensor]
    """By their key in `mm_kwargs`; those of several items are joined along the first dimension. Where only
    sizes were asked for, those that hold pixels are missing."""

    layout: Mapping[str, Any]
    """How it was cut, for the metadata of what is encoded: "grid", "tiles" or "crops"."""

    frames: int = 0
    """Frames of a clip; 0: an image."""

    @property
    def sizes(self) -> dict[str, Tensor]:
        """The tensors that hold no pixels."""
        return {n: t for n, t in self.tensors.items() if t.dtype == torch.int64 and n != PIXEL_PLAN}

    def with_pixels(self, **pixels: Tensor) -> Prepared:
        """The same with the tensors that hold its pixels."""
        return replace(self, tensors={**pixels, **self.tensors})


class Preparation(ABC):
    """Prepares images, and clips if the model takes any, as the model's own processor does."""

    takes_clips = False
    image_options: ClassVar[Mapping[str, int]] = {}
    """The image processor's settings that may differ from item to item, integers from 1, and the most that
    each may be."""
    clip_options: ClassVar[Mapping[str, int]] = {}
    """The video processor's, without those of sampling."""
    frames_per_step = 1
    """Frames of a clip that become one along its grid."""
    sampling: Sampling | None = None
    """Which frames of a video the model sees, as its video processor samples them; None: all."""

    @abstractmethod
    def image(self, image: Image.Image) -> Prepared:
        """The inputs of an upright RGB image."""

    @abstractmethod
    def image_sizes(self, width: int, height: int) -> Prepared:
        """Returns the sizes of `image`'s result for an image of this size."""

    def plan(self, width: int, height: int) -> ResizePlan | None:
        """How a device makes `image`'s pixels of an image of this size; None: it is cut in another way."""
        return None

    def sample(self, num_frames: int, fps: float | None) -> Sequence[int]:
        """Which frames of a video the model sees, rising."""
        return range(num_frames) if self.sampling is None else self.sampling(num_frames, fps)

    def clip(self, frames: Frames) -> list[Prepared]:
        """The inputs of a clip, where `takes_clips`: one item, or several of a few frames each."""
        raise NotImplementedError

    def clip_sizes(self, num_frames: int, width: int, height: int) -> list[Prepared]:
        """Returns the sizes of `clip`'s result for a clip of this size."""
        raise NotImplementedError


@dataclass(frozen=True)
class Normalization:
    """Subtracted from every channel, whose values are 0 to 1, and divided by."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_later: bool = False
    """Whether pixels are left as they are, 0 to 255, for someone else to normalize by `values`."""

    def updated(self, settings: Mapping[str, Any]) -> Normalization:
        """A copy with what a processor's JSON file sets."""
        mean, std = settings.get("image_mean"), settings.get("image_std")
        is_later = all(settings.get(name) is False for name in _LATER)
        return Normalization(tuple(mean or self.mean), tuple(std or self.std), is_later)

    def as_settings(self) -> dict[str, Any]:
        """Returns these settings as arguments of a transformers processor."""
        statistics = {"image_mean": list(self.mean), "image_std": list(self.std)}
        return {**statistics, **(_LATER if self.is_later else {})}

    def values(self) -> NDArray[np.float32]:
        """(channels, 256): what each value of each channel becomes."""
        # Through float64 and back, as the image processors do, so that the same pixels give the same values.
        scaled = (np.arange(256) * (1 / 255)).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
        return (scaled - mean) / std

    def __call__(self, images: Sequence[Image.Image]) -> Tensor:
        """(images, 3, height, width), of images of one size: values around 0, or uint8 if `is_later`."""
        return self.of_channels(np.stack([np.asarray(image).transpose(2, 0, 1) for image in images]))

    def of_channels(self, pixels: NDArray[np.uint8]) -> Tensor:
        """The same of the pixels of three channels, (rows, 3, ...)."""
        if self.is_later:
            return torch.from_numpy(pixels)
        made = np.empty(pixels.shape, np.float32)
        for channel, values in enumerate(self.values()):
            made[:, channel] = np.take(values, pixels[:, channel])
        return torch.from_numpy(made)


class ImageSteps:
    """Does for images what comes before the `first` step of a device, and what the device cannot do: all
    of it where it cannot normalize them.
    """

    def __init__(self, first: OnDevice, *, normalizes: bool = True) -> None:
        self._first, self._normalizes = first, normalizes
        self.on_host = OnHost()

    def image(
        self, preparation: Preparation, limits: MediaSettings, media: Any, loaded: Image.Image | None = None
    ) -> Prepared:
        """The inputs of an image as `load_image` takes it, or of `loaded`, what was made of it. `preparation`
        leaves pixels as they are where the device does a step.
        """
        found: int | str = "what is scaled, or no file"
        if self._first == "decode" and loaded is None:
            found = jpeg_orientation(media, limits)
        if isinstance(found, str):
            loaded = load_image(media, limits) if loaded is None else loaded
        size = measure_image(media, limits) if loaded is None else loaded.size
        is_left = self._first != "normalize" and self._normalizes
        plan = preparation.plan(*size) if is_left else None
        if plan is None:
            if self._first != "normalize":
                self.on_host.add("the device cannot normalize or cut images as this model wants them")
            return preparation.image(load_image(media, limits) if loaded is None else loaded)
        if self._first == "decode" and isinstance(found, str):
            self.on_host.add(f"the device does not decode {found}")
        source = np.frombuffer(media, np.uint8) if loaded is None else np.asarray(loaded)
        numbers = torch.tensor([*plan, found if isinstance(found, int) else 1], device="cpu")
        raw = {"pixel_values": torch.from_numpy(source.copy()), PIXEL_PLAN: numbers}
        return preparation.image_sizes(*size).with_pixels(**raw)


HALF = Normalization((0.5,) * 3, (0.5,) * 3)
CLIP = Normalization((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def processed(processor: Any, image: Image.Image, **options: Any) -> Any:
    """Processes an image by a transformers image processor, on the CPU."""
    with torch.device("cpu"):
        return processor(images=[image], return_tensors="pt", **options)


# --- files


@dataclass(frozen=True)
class Item:
    """One image or clip of a batch, or a part of a clip."""

    key: str
    """Its file name; from the second file of that name on, with #2, #3, ... in the order given. The items of
    one clip have [1], [2], ... at the end."""

    width: int
    height: int
    """Of the file, before it was resized."""

    frames: int
    """Frames of a clip; 0: an image."""

    layout: Mapping[str, Any]
    """How it was cut, see `Prepared.layout`."""

    @property
    def unit(self) -> str:
        """What `size` counts."""
        return "patches" if "grid" in self.layout else "tiles"

    @property
    def size(self) -> str:
        """The layout in few characters: patches, tiles, or whole views + crops."""
        ((kind, parts),) = self.layout.items()
        count = parts if isinstance(parts, int) else math.prod(parts)
        return str(count) if kind != "crops" else f"1+{count}" if count else "1"

    @property
    def pixels(self) -> str:
        """Its size as people write it."""
        size = f"{self.width}x{self.height}"
        return f"{self.frames}x{size}" if self.frames else size


@dataclass(frozen=True)
class EncoderInputs:
    """A batch: its items, images first, then clips, and their tensors as the model's processor makes them."""

    items: tuple[Item, ...]
    mm_kwargs: dict[str, torch.Tensor]

    def to(self, device: torch.device, dtype: torch.dtype) -> EncoderInputs:
        """The same batch with its pixels on `device`, as `dtype`."""
        moved = {k: v.to(device, dtype) if v.is_floating_point() else v for k, v in self.mm_kwargs.items()}
        return EncoderInputs(self.items, moved)


def load_inputs(paths: Sequence[Path], preparation: Preparation) -> EncoderInputs:
    """Read images and clips, the animated files that Pillow decodes: WebP, GIF, APNG. Every frame counts.

    Raises:
        InputError: a file is missing, is no image, is too elongated, or is a clip for a model without any.
    """
    named = zip(unique_keys(paths), paths, strict=True)
    pairs = [pair for key, path in named for pair in _load(key, path, preparation)]
    pairs.sort(key=lambda pair: pair[0].frames > 0)
    return EncoderInputs(tuple(item for item, _ in pairs), joined_inputs(prepared for _, prepared in pairs))


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The image and clip files among `paths`, directories searched one level deep, in order of name.

    Raises:
        InputError: a path does not exist, or a directory holds none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(file for file in path.iterdir() if file.suffix.lower() in _EXTENSIONS)
        if not inside:
            raise InputError(f"{path}: no image in this directory; expected {', '.join(_EXTENSIONS)}")
        found += inside
    return found


def unique_keys(paths: Sequence[Path]) -> list[str]:
    """The file names; from the second file of a name on, with #2, #3, ... in the order given."""
    keys: dict[str, None] = {}
    for path in paths:
        number = 1
        name = key = path.name.encode("utf-8", "replace").decode()  # of other bytes a key cannot be
        while key in keys:
            number += 1
            key = f"{name}#{number}"
        keys[key] = None
    return list(keys)


def _load(key: str, path: Path, preparation: Preparation) -> list[tuple[Item, Prepared]]:
    with opened_image(path, _LIMITS) as image, attempt(str(path), "an image"):
        # An MPO file is a photograph with a preview or a depth map, and the pages of a TIFF are no frames.
        if getattr(image, "is_animated", False) and image.format not in ("MPO", "TIFF"):
            if not preparation.takes_clips:
                raise MediaError("it is a clip, and this model takes images only; leave it out")
            clip = AnimatedImage(image, _LIMITS.background)
            size, parts = image.size, preparation.clip(Frames(clip, range(clip.header.num_frames)))
        else:
            turned = load_image(image, _LIMITS)
            size, parts = turned.size, [preparation.image(turned)]
    keys = [key] if len(parts) == 1 else [f"{key}[{n}]" for n in range(1, len(parts) + 1)]
    return [
        (Item(name, *size, part.frames, part.layout), part) for name, part in zip(keys, parts, strict=True)
    ]


def joined_inputs(prepared: Iterable[Prepared]) -> dict[str, Tensor]:
    """The tensors of several items as `mm_kwargs`, of a single one as they are."""
    parts: dict[str, list[Tensor]] = {}
    for item in prepared:
        for name, tensor in item.tensors.items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(own) if len(own) > 1 else own[0] for name, own in parts.items()}
