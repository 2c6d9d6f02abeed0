"""Media to the inputs of one tower: images, videos and audio with the options of an item.

By the processors of a checkpoint; pixels may stay uint8 until they are encoded.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fxsplit_encoder.caching import Recent
from fxsplit_encoder.connector.interfaces import (
    PIXEL_TABLE,
    MediaItem,
    MediaProcessor,
    Modality,
    PreparedItem,
    PromptRun,
    Reduction,
)
from fxsplit_encoder.connector.keys import HashName, Part, canonical, digest_of, item_digest
from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media import (
    AudioSamples,
    Frames,
    MediaSettings,
    load_audio,
    load_image,
    measure_audio,
    measure_image,
    open_video,
    pixel_bytes,
    pixels_of,
    read_source,
    sample_bytes,
    scaled,
    shrunk,
)
from fxsplit_encoder.media.sources import Encoded, attempt
from fxsplit_encoder.messages import name_of, nearest, shown
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.family import Family, Settings
from fxsplit_encoder.models.load import read_family
from fxsplit_encoder.models.prepare import (
    ImageSteps,
    Normalization,
    OnDevice,
    Preparation,
    Prepared,
    ProcessorSettings,
    joined_inputs,
)
from fxsplit_encoder.models.sampling import frame_seconds, with_sampling
from fxsplit_encoder.models.tiles import ProcessedTiles
from fxsplit_encoder.towers.inputs import PixelValues

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Which numbers an option may be: those above 0."""

    most: float = math.inf
    is_whole: bool = False

    def __str__(self) -> str:
        if self.is_whole:
            return f"an integer from 1 to {self.most}"
        return "a number above 0" if self.most == math.inf else f"a number above 0, up to {self.most}"

    def fits(self, value: Any) -> bool:
        """Whether a value is such a number."""
        kinds = int if self.is_whole else int | float | np.number
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        return is_number and bool(0 < value <= self.most and value < math.inf)


Allowed = Mapping[str, Limits | None]
"""The options that an item may have; None: True or False."""

_FRAMES = Limits(1 << 16, is_whole=True)

SAMPLING: Allowed = {
    "do_sample_frames": None,
    "fps": Limits(),
    "num_frames": _FRAMES,
    "min_frames": _FRAMES,
    "max_frames": _FRAMES,
    "max_duration": Limits(),
}
"""Which frames of a video are seen."""


SCALE = "scale"
"""By which both sides of an image or of a video's frames are shrunk before the processor sees them."""

ANY: Allowed = {SCALE: Limits(1)}
"""What any processor's images and videos may have."""


def check_options(options: Mapping[str, object], allowed: Allowed) -> None:
    """Raises MediaError for an option of another name, or of another value than it may have."""
    for name, value in options.items():
        if name not in allowed:
            raise MediaError(
                f"options: {name_of(name)} is unknown; {nearest(str(name), list(allowed))}"
                f"expected one of {', '.join(allowed) or 'none'}"
            )
        limits = allowed[name]
        if not (isinstance(value, bool) if limits is None else limits.fits(value)):
            raise MediaError(f"options: {name}: expected {limits or 'True or False'}; got {shown(value)}")


Prepare = Callable[[Modality, Mapping[str, object]], Preparation]
"""A preparation for an item's modality and options."""


_MOST_PREPARATIONS = 64
_MOST_HALVINGS = 8


class _Processor(MediaProcessor):
    """Base class of the processors of one tower."""

    def __init__(
        self, tower: Any, fingerprint: bytes, limits: MediaSettings | None, hash_name: HashName
    ) -> None:
        digest_of([], hash_name)  # a missing package is found here
        self.tower = tower
        self.limits = limits or MediaSettings()
        # Encoded images of equal bytes and another background are other inputs.
        self.fingerprint = fingerprint + bytes(self.limits.background)
        self.hash_name: HashName = hash_name

    def _count_of(self, *inputs: Mapping[str, torch.Tensor]) -> int:
        """Rows by the tower's own arithmetic."""
        specs = self.tower.get_encoder_cudagraph_item_specs
        count: int = sum(spec.output_tokens for part in inputs for spec in specs(dict(part)))
        self.limits.check("max_tokens", count, "its feature")
        return count

    def _digest(self, item: MediaItem, parts: Iterable[Part]) -> bytes:
        media = digest_of(parts, self.hash_name)
        fingerprint = digest_of([item.modality.encode(), self.fingerprint], self.hash_name)
        return item_digest(media, fingerprint, item.options, self.hash_name)


class TowerProcessor(_Processor):
    """Images and videos to the inputs of one tower.

    Args:
        tower: what `wrap` returns; its weights are never read, so it may lie on the meta device.
        prepare: the model's preparation with the arguments of an item, which were checked by name.
        fingerprint: of the model's processor: equal ones make equal inputs of equal media.
        limits: for every item.
        hash_name: of the function for digests.
        tables: by modality whose pixels the preparation leaves as they are, 0 to 255: the `PIXEL_TABLE` that
            its items have.
    """

    def __init__(
        self,
        tower: Any,
        prepare: Prepare,
        fingerprint: bytes,
        limits: MediaSettings | None = None,
        hash_name: HashName = "blake3",
        tables: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(tower, fingerprint, limits, hash_name)
        self.tables = dict(tables or {})
        self.steps = ImageSteps("normalize")
        self._prepare = prepare
        self._preparations: Recent[bytes, Preparation] = Recent(_MOST_PREPARATIONS)
        self._lock = threading.Lock()
        plain = prepare("image", {})
        self._options: dict[str, Allowed] = {"image": {**ANY, **_integers(plain.image_options)}}
        if plain.takes_clips:
            self._options["video"] = {**ANY, **SAMPLING, **_integers(plain.clip_options)}
        levels = getattr(tower, "deepstack_levels", 0)
        columns = tower.get_encoder_cudagraph_config().out_hidden_size
        self._facts = {"hidden_size": columns // (1 + levels), "deepstack_levels": levels}

    # --- what a connector asks

    def count_tokens(self, item: MediaItem) -> int:
        """Rows of the item's feature, from its header or its shape; nothing is decoded or hashed.

        Raises:
            MediaError: it is nothing that this model takes, or is beyond a limit.
        """
        preparation = self._preparation(item)
        if item.modality == "image":
            return self._count([self._image_sizes(item, preparation)])
        with self._clip(item, preparation) as (_, count):
            return count

    def prompt_runs(self, item: MediaItem) -> list[PromptRun]:
        """What a prompt shows of the item: an image's rows in one run, of a video a run for each step of its
        grid, with the time of its frames where that is known. Models whose prompts show no times join them.

        Raises:
            MediaError: as `count_tokens`.
        """
        if item.modality == "image":
            return [PromptRun(self.count_tokens(item))]
        preparation = self._preparation(item)
        with self._clip(item, preparation) as (frames, count):
            step = preparation.frames_per_step
            seconds: Any = frame_seconds(frames.indices, frames.video.header, step).get("grid_seconds")
        num_steps = -(-len(frames) // step)
        if count % num_steps:  # its rows are not of single steps
            return [PromptRun(count)]
        return [PromptRun(count // num_steps, each) for each in seconds or [None] * num_steps]

    def digest(self, item: MediaItem) -> bytes:
        """Identifies the prepared item without preparing it: equal digests mean equal inputs.

        Raises:
            MediaError: it cannot be read.
        """
        media = read_source(item.media, self.limits)
        if isinstance(media, Encoded):
            return self._digest(item, [media])
        if item.modality == "image":
            return self._digest(item, pixel_bytes(pixels_of(media, self.limits)))
        with open_video(media, self.limits) as video:
            return self._digest(item, video.parts())

    def prepare(self, item: MediaItem) -> PreparedItem:
        """Read, hash, decode and preprocess one item. Its inputs are on the CPU.

        Raises:
            MediaError: it cannot be decoded, or is beyond a limit.
        """
        preparation = self._preparation(item)
        item = replace(item, media=read_source(item.media, self.limits))
        prepare = self._prepare_image if item.modality == "image" else self._prepare_video
        return prepare(item, preparation)

    def reduce(self, item: MediaItem, how: Reduction) -> MediaItem | None:
        """The item with half its frames, or with sides so small that its feature has half as many rows.

        Returns:
            None: an image has no frames to give, or the model's processor enlarges what is smaller.

        Raises:
            MediaError: as `count_tokens`.
        """
        if how == "half_frames":
            return self._with_half_the_frames(item)
        count = self.count_tokens(item)
        for halvings in range(1, _MOST_HALVINGS):
            smaller = _with_options(item, {SCALE: _scale(item) / 2**halvings})
            with contextlib.suppress(MediaError):  # a side became too small
                if self.count_tokens(smaller) * 2 <= count:
                    return smaller
        return None

    def _with_half_the_frames(self, item: MediaItem) -> MediaItem | None:
        if item.modality != "video":
            return None
        preparation = self._preparation(item)
        with self._clip(item, preparation) as (frames, count):
            if len(frames) < 2 * preparation.frames_per_step:
                return None
        shorter = _with_options(item, {"num_frames": len(frames) // 2}, dropped="fps")
        if self.count_tokens(shorter) * 4 <= count * 3:
            return shorter
        # The frames share a number of pixels: half of them are larger.
        return self.reduce(shorter, "half_resolution")

    # --- modalities

    def _image_sizes(self, item: MediaItem, preparation: Preparation) -> Prepared:
        width, height = (scaled(side, _scale(item)) for side in measure_image(item.media, self.limits))
        return preparation.image_sizes(width, height)

    @contextlib.contextmanager
    def _clip(self, item: MediaItem, preparation: Preparation) -> Iterator[tuple[Frames, int]]:
        """The frames of a video that its model sees, and the rows that they have."""
        with open_video(item.media, self.limits) as video:
            indices = preparation.sample(video.header.num_frames, video.header.fps)
            frames = video.select(indices, self.limits, _scale(item))
            yield frames, self._count(preparation.clip_sizes(len(frames), *frames.size))

    def _prepare_image(self, item: MediaItem, preparation: Preparation) -> PreparedItem:
        # Within the limits before it is decoded.
        count = self._count([self._image_sizes(item, preparation)])
        loaded: Image.Image | None = None
        parts: list[Part] = [item.media] if isinstance(item.media, Encoded) else []
        if not parts or _scale(item) != 1:
            loaded = load_image(item.media, self.limits)
            parts = parts or [*pixel_bytes(np.asarray(loaded))]
            loaded = shrunk(loaded, _scale(item))
        with attempt("image", "what the model takes"):
            inputs = [self.steps.image(preparation, self.limits, item.media, loaded)]
        return self._item(item, self._digest(item, parts), count, inputs, {})

    def _prepare_video(self, item: MediaItem, preparation: Preparation) -> PreparedItem:
        with self._clip(item, preparation) as (frames, count):
            parts = [item.media] if isinstance(item.media, Encoded) else frames.video.parts()
            digest = self._digest(item, parts)
            with attempt("video", "what the model takes"):
                inputs = preparation.clip(frames)
        seconds = frame_seconds(frames.indices, frames.video.header, preparation.frames_per_step)
        return self._item(item, digest, count, inputs, seconds)

    def _item(
        self,
        item: MediaItem,
        digest: bytes,
        count: int,
        inputs: Sequence[Prepared],
        facts: Mapping[str, object],
    ) -> PreparedItem:
        made = self._count(inputs)
        if made != count:
            raise MediaError(
                f"{item.modality}: its processor makes {made} rows of it, where its size says {count}; the "
                "processor cuts images in a way that is not known here"
            )
        layouts = [part.layout for part in inputs]
        layout = layouts[0] if len(layouts) == 1 else {"parts": layouts}
        tensors = self._with_table(item.modality, joined_inputs(inputs))
        return PreparedItem(item.modality, digest, tensors, count, {**self._facts, **layout, **facts})

    def _with_table(self, modality: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs with what their pixels become, where they were left as they are."""
        table = self.tables.get(modality)
        if table is None:
            return tensors
        # Some processors lay whole numbers out as floats.
        pixels = {name: t.byte() if t.is_floating_point() else t for name, t in tensors.items()}
        return {**pixels, PIXEL_TABLE: table}

    # --- what both have

    def _preparation(self, item: MediaItem) -> Preparation:
        """That of an item's options; those of the latest options are kept."""
        if item.modality not in self._options:
            expected = " or ".join(self._options)
            raise MediaError(
                f"modality: expected {expected}, which the model takes; got {shown(item.modality)}"
            )
        check_options(item.options, self._options[item.modality])
        key = canonical([item.modality, _without(item.options, SCALE)])
        with self._lock:
            found: Preparation | None = self._preparations.get(key)
            if found is None:
                with attempt("options", "options of the processor"):
                    found = self._prepare(item.modality, _without(item.options, SCALE))
                self._preparations[key] = found
        return found

    def _count(self, inputs: Sequence[Prepared]) -> int:
        return self._count_of(*(part.sizes for part in inputs))


def _integers(most: Mapping[str, int]) -> Allowed:
    return {name: Limits(last, is_whole=True) for name, last in most.items()}


def _without(options: Mapping[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in options.items() if key != name}


def _with_options(item: MediaItem, added: Mapping[str, object], dropped: str = "") -> MediaItem:
    return replace(item, options={**_without(item.options, dropped), **added})


def _scale(item: MediaItem) -> float:
    scale: Any = item.options.get(SCALE, 1.0)
    return float(scale)


class AudioProcessor(_Processor):
    """Audio to the inputs of one tower: pieces of equal length, the last one padded with silence.

    A piece has the same number of rows whether it is full or not, as its model is used to; the metadata say
    how many of an item's rows have sound.

    Args:
        tower: what `wrap` returns; its weights are never read, so it may lie on the meta device.
        extractor: the model's own, such as a WhisperFeatureExtractor, called by several threads.
        fingerprint: of the extractor: equal ones make equal inputs of equal samples.
        limits: for every item.
        hash_name: of the function for digests.
    """

    def __init__(
        self,
        tower: Any,
        extractor: Any,
        fingerprint: bytes,
        limits: MediaSettings | None = None,
        hash_name: HashName = "blake3",
    ) -> None:
        super().__init__(tower, fingerprint, limits, hash_name)
        self.extractor = extractor

    def count_tokens(self, item: MediaItem) -> int:
        """See `MediaProcessor`; MediaError: it is no audio of the model's rate, or is beyond a limit."""
        return self._count(self._num_samples(item))

    def prompt_runs(self, item: MediaItem) -> list[PromptRun]:
        """One run of all its tokens."""
        return [PromptRun(self.count_tokens(item))]

    def digest(self, item: MediaItem) -> bytes:
        """See `MediaProcessor`; MediaError: as `count_tokens`."""
        self._num_samples(item)
        return self._digest(item, _audio_parts(read_source(item.media, self.limits)))

    def prepare(self, item: MediaItem) -> PreparedItem:
        """Read, hash, decode and preprocess one item. Its inputs are on the CPU.

        Raises:
            MediaError: it cannot be decoded, or is beyond a limit.
        """
        item = replace(item, media=read_source(item.media, self.limits))
        num_samples = self._num_samples(item)
        count, digest = self._count(num_samples), self._digest(item, _audio_parts(item.media))
        samples, piece = load_audio(item.media, self.limits), self.extractor.n_samples
        pieces = [samples[start : start + piece] for start in range(0, num_samples, piece)]
        with attempt("audio", "what the model takes"), torch.device("cpu"):
            made = self.extractor(pieces, sampling_rate=self.extractor.sampling_rate, return_tensors="pt")
            inputs = {self.tower.input_name: made[self.tower.input_name], **self._sizes(len(pieces))}
        metadata = {
            "hidden_size": self.tower.out_hidden_size,
            "seconds": num_samples / self.extractor.sampling_rate,
            "pieces": len(pieces),
            "rows_with_sound": -(-num_samples * count // (len(pieces) * piece)),
        }
        return PreparedItem("audio", digest, inputs, count, metadata)

    def _num_samples(self, item: MediaItem) -> int:
        if item.modality != "audio":
            raise MediaError(f"modality: expected audio, which the model takes; got {shown(item.modality)}")
        check_options(item.options, {})
        header, expected = measure_audio(item.media, self.limits), self.extractor.sampling_rate
        if header.rate != expected:
            raise MediaError(
                f"audio: expected {expected} samples a second, the model's; got {header.rate}; resample it"
            )
        return header.num_samples

    def _count(self, num_samples: int) -> int:
        return self._count_of(self._sizes(-(-num_samples // self.extractor.n_samples)))

    def _sizes(self, pieces: int) -> dict[str, torch.Tensor]:
        return {self.tower.count_keys[0]: torch.tensor([pieces], device="cpu")}


def _audio_parts(media: object) -> Iterable[Part]:
    if isinstance(media, AudioSamples):
        return sample_bytes(media)
    return [media] if isinstance(media, Encoded) else []


# --- the processors of a checkpoint

_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"


def media_processor(
    tower: Any,
    model: str | Path | Checkpoint,
    limits: MediaSettings | None = None,
    hash_name: HashName = "blake3",
    *,
    normalize_later: bool = False,
    on_device: OnDevice = "normalize",
) -> TowerProcessor | AudioProcessor:
    """Prepares media as the processors of a checkpoint say.

    Args:
        tower: what `wrap` returns, of this model; only its arithmetic is used.
        model: a directory or a hub name.
        limits: for every item.
        hash_name: of the function for digests.
        normalize_later: see `family_processor`; audio stays as it is.
        on_device: "resize": images are left as they were decoded, for a `ManagerEncoder` to resize and cut
            as Pillow does; "decode": JPEG files are left. The host does what the device cannot.

    Raises:
        InputError: a file is missing or malformed, or names no family that is known.
    """
    checkpoint = Checkpoint.locate(model)
    family, settings = read_family(checkpoint)
    if family.extractor is not None:
        own = checkpoint.read_json(_PREPROCESSOR) or checkpoint.read_json(_PROCESSOR) or {}
        found = own.get("feature_extractor", own)
        return audio_processor(tower, family.extractor(found), limits, hash_name)
    given = checkpoint.processors().on(on_device)
    return family_processor(
        tower, family, settings, given, limits, hash_name, normalize_later=normalize_later
    )


def family_processor(
    tower: Any,
    family: Family,
    settings: Settings,
    processors: ProcessorSettings | None = None,
    limits: MediaSettings | None = None,
    hash_name: HashName = "blake3",
    *,
    normalize_later: bool = False,
) -> TowerProcessor:
    """Prepares media as a family does.

    Args:
        tower: what `wrap` returns.
        family: one of `registry.FAMILIES`.
        settings: the model's config.json, or that of its tower.
        processors: what the JSON files of its processors say, or the `to_dict()` of transformers' objects.
        limits: for every item.
        hash_name: of the function for digests.
        normalize_later: whether pixels are left as they are, uint8, for a `ManagerEncoder` to normalize on
            its device (`PIXEL_TABLE`), of each modality for which that gives the processor's very values.
    """
    given = processors or ProcessorSettings()
    later = given.normalizing_later()
    whole = family.prepare(settings, given)
    is_later = normalize_later or given.on_device != "normalize"
    tables = _tables(whole, family.prepare(settings, later), given.on_device) if is_later else {}

    def prepare(modality: str, options: Mapping[str, object]) -> Preparation:
        used = later if modality in tables else given
        if modality == "image":
            own = None if options else used.own  # which has the settings of its files
            return family.prepare(settings, replace(used, image={**used.image, **options}, own=own))
        return family.prepare(settings, replace(used, video=with_sampling(used.video, options)))

    parts = [type(whole).__qualname__, settings, given.image, given.video]
    parts += [] if given.on_device == "normalize" else [given.on_device]
    described = canonical(parts, "settings")
    processor = TowerProcessor(tower, prepare, _fingerprint(described, hash_name), limits, hash_name, tables)
    processor.steps = ImageSteps(given.on_device, normalizes="image" in tables)
    return processor


def _tables(whole: Preparation, later: Preparation, on_device: OnDevice) -> dict[str, torch.Tensor]:
    # Clips are resized by the host.
    steps: dict[Modality, OnDevice] = {"image": on_device}
    steps |= {"video": "normalize"} if whole.takes_clips else {}
    found = {modality: pixel_table(whole, later, modality, first) for modality, first in steps.items()}
    return {name: torch.from_numpy(table) for name, table in found.items() if table is not None}


def tiles_processor(
    tower: Any, processor: Any, limits: MediaSettings | None = None, hash_name: HashName = "blake3"
) -> TowerProcessor:
    """Prepares images for a dense tower by any image processor of transformers.

    Args:
        tower: what `wrap` returns of a module that encodes tiles of one size.
        processor: such as `AutoImageProcessor.from_pretrained` returns. It makes one tile of an image, or as
            many as its `get_number_of_image_patches` says.
        limits: for every item.
        hash_name: of the function for digests.
    """
    made = ProcessedTiles(processor)
    described = processor.to_json_string().encode()
    return TowerProcessor(
        tower, lambda modality, options: made, _fingerprint(described, hash_name), limits, hash_name
    )


def audio_processor(
    tower: Any, extractor: Any, limits: MediaSettings | None = None, hash_name: HashName = "blake3"
) -> AudioProcessor:
    """Prepares audio for a tower by a feature extractor of transformers."""
    described = extractor.to_json_string().encode()
    return AudioProcessor(tower, extractor, _fingerprint(described, hash_name), limits, hash_name)


def _fingerprint(described: bytes, hash_name: HashName) -> bytes:
    """Of a processor with the packages that resize and normalize, whose versions may differ in a value."""
    packages = [f"{name} {version(name)}".encode() for name in ("transformers", "pillow", "numpy", "torch")]
    return digest_of([described, *packages], hash_name)


# --- pixels that are normalized later

# The second has to be resized, whatever the sides of patches.
_PROBES = ((160, 160), (150, 170))


def pixel_table(
    whole: Preparation, later: Preparation, modality: Modality, on_device: OnDevice = "normalize"
) -> NDArray[np.float32] | None:
    """Compute the normalized float of each uint8 value of each channel, (channels, 256).

    Returns:
        None: on images of all colors the table gives other values than the model's processor. With an
        `on_device` before normalize, on noise too, but a mean difference of one of 256 levels is allowed: the
        device resizes as Pillow does, and the processor may resize by torchvision.
    """
    reason: object = "it gives other values"
    try:
        table = _normalization_of(whole, modality).values()
        images, levels = [_all_colors(*size) for size in _PROBES], 0.0
        if on_device != "normalize":
            noise = np.random.default_rng(0).integers(0, 256, (*_PROBES[1], 3), np.uint8)
            images, levels = [*images, Image.fromarray(noise)], 1.0
        limit = levels * float(np.ptp(table)) / 255
        if all(
            _are_close(_made(whole, modality, i), _made(later, modality, i), table, limit) for i in images
        ):
            return table
    except (AttributeError, MediaError, TypeError, ValueError) as error:  # it does something else with pixels
        reason = error
    logger.info("%s pixels are normalized by the model's own processor: %s", modality, reason)
    return None


def _normalization_of(preparation: Any, modality: Modality) -> Normalization:
    """Finds the normalization of images or clips: the preparation's, its format's, or its processor's."""
    for holder in (preparation, getattr(preparation, f"{modality}_format", None)):
        own = getattr(holder, "normalization", None)
        if isinstance(own, Normalization):
            return own
    processor: Any = getattr(preparation, "processor", None)
    return Normalization(tuple(processor.image_mean), tuple(processor.image_std))


def _made(preparation: Preparation, modality: Modality, image: Image.Image) -> list[Prepared]:
    return [preparation.image(image)] if modality == "image" else preparation.clip(_frames(image))


def _are_close(
    whole: list[Prepared], later: list[Prepared], table: NDArray[np.float32], limit: float
) -> bool:
    values = PixelValues(table, torch.float32, torch.device("cpu"))
    for now, then in zip(whole, later, strict=True):
        for name, given in now.tensors.items():
            pixels = then.tensors[name].byte()
            if not given.is_floating_point():
                continue
            if not (torch.equal(pixels, then.tensors[name]) and given.shape == pixels.shape):
                return False
            if not (given - values(pixels)).abs().sum() <= limit * given.numel():
                return False
    return True


def _all_colors(width: int, height: int) -> Image.Image:
    """Every value of every channel, each channel in another order."""
    ramp = np.arange(width * height) * 256 // (width * height)
    turned = ramp.reshape(width, height).T
    channels = [ramp.reshape(height, width), ramp[::-1].reshape(height, width), turned]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def _frames(image: Image.Image) -> Frames:
    with open_video([image, image.transpose(Image.Transpose.ROTATE_180)] * 2, MediaSettings()) as video:
        return video.select(range(4), MediaSettings())
