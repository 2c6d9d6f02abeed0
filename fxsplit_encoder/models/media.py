"""A checkpoint's media processor, and pixels that stay uint8 until they are encoded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fxsplit_encoder.connector.interfaces import Modality
from fxsplit_encoder.connector.keys import HashName, canonical, digest_of
from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media import Frames, MediaSettings, open_video
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.family import Family, Settings
from fxsplit_encoder.models.load import read_family
from fxsplit_encoder.models.prepare import Normalization, Preparation, Prepared, ProcessorSettings
from fxsplit_encoder.models.preprocess import AudioProcessor, TowerProcessor
from fxsplit_encoder.models.sampling import with_sampling
from fxsplit_encoder.models.tiles import ProcessedTiles
from fxsplit_encoder.towers.inputs import PixelValues

logger = logging.getLogger(__name__)

# The second has to be resized, whatever the sides of patches.
_PROBES = ((160, 160), (150, 170))


def pixel_table(whole: Preparation, later: Preparation, modality: Modality) -> NDArray[np.float32] | None:
    """Compute the normalized float of each uint8 value of each channel, (channels, 256).

    Returns:
        None: on images of all colors the table gives other values than the model's processor.
    """
    try:
        table = normalization_of(whole, modality).values()
        is_same = all(_are_equal(*_probed(whole, later, modality, size), table) for size in _PROBES)
    except (AttributeError, MediaError, TypeError, ValueError) as error:  # it does something else with pixels
        logger.info("%s pixels are normalized by the model's own processor: %s", modality, error)
        return None
    if not is_same:
        logger.info("%s pixels are normalized by the model's own processor: it gives other values", modality)
    return table if is_same else None


def normalization_of(preparation: Any, modality: Modality = "image") -> Normalization:
    """Finds the normalization of images or clips: the preparation's, its format's, or its processor's."""
    for holder in (preparation, getattr(preparation, f"{modality}_format", None)):
        own = getattr(holder, "normalization", None)
        if isinstance(own, Normalization):
            return own
    processor: Any = getattr(preparation, "processor", None)
    return Normalization(tuple(processor.image_mean), tuple(processor.image_std))


def _probed(
    whole: Preparation, later: Preparation, modality: Modality, size: tuple[int, int]
) -> tuple[list[Prepared], list[Prepared]]:
    image = _all_colors(*size)
    if modality == "image":
        return [whole.image(image)], [later.image(image)]
    return list(whole.clip(_frames(image))), list(later.clip(_frames(image)))


def _are_equal(whole: list[Prepared], later: list[Prepared], table: NDArray[np.float32]) -> bool:
    values = PixelValues(table, torch.float32, torch.device("cpu"))
    for now, then in zip(whole, later, strict=True):
        for name, given in now.tensors.items():
            pixels = then.tensors[name].byte()
            is_pixels = given.is_floating_point()
            if is_pixels and not (
                torch.equal(pixels, then.tensors[name]) and torch.equal(given, values(pixels))
            ):
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


_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"


def media_processor(
    tower: Any,
    model: str | Path | Checkpoint,
    limits: MediaSettings | None = None,
    hash_name: HashName = "blake3",
    *,
    normalize_later: bool = False,
) -> TowerProcessor | AudioProcessor:
    """Prepares media as the processors of a checkpoint say.

    Args:
        tower: what `wrap` returns, of this model; only its arithmetic is used.
        model: a directory or a hub name.
        limits: for every item.
        hash_name: of the function for digests.
        normalize_later: see `family_processor`; audio stays as it is.

    Raises:
        InputError: a file is missing or malformed, or names no family that is known.
    """
    checkpoint = Checkpoint.locate(model)
    family, settings = read_family(checkpoint)
    if family.extractor is not None:
        own = checkpoint.read_json(_PREPROCESSOR) or checkpoint.read_json(_PROCESSOR) or {}
        found = own.get("feature_extractor", own)
        return audio_processor(tower, family.extractor(found), limits, hash_name)
    given = checkpoint.processors()
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
    tables = _tables(whole, family.prepare(settings, later)) if normalize_later else {}

    def prepare(modality: str, options: Mapping[str, object]) -> Preparation:
        used = later if modality in tables else given
        if modality == "image":
            own = None if options else used.own  # which has the settings of its files
            return family.prepare(settings, replace(used, image={**used.image, **options}, own=own))
        return family.prepare(settings, replace(used, video=with_sampling(used.video, options)))

    described = canonical([type(whole).__qualname__, settings, given.image, given.video], "settings")
    return TowerProcessor(tower, prepare, _fingerprint(described, hash_name), limits, hash_name, tables)


def _tables(whole: Preparation, later: Preparation) -> dict[str, torch.Tensor]:
    modalities: list[Modality] = ["image", "video"] if whole.takes_clips else ["image"]
    found = {modality: pixel_table(whole, later, modality) for modality in modalities}
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
