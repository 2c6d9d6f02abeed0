"""Who prepares media for a tower in the connector: a known family's way, or any image processor's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fxsplit_encoder.connector.audio import AudioProcessor
from fxsplit_encoder.connector.keys import HashName, canonical, digest_of
from fxsplit_encoder.connector.preparation import Preparation
from fxsplit_encoder.connector.preprocess import TowerProcessor
from fxsplit_encoder.connector.seams import Modality
from fxsplit_encoder.media import MediaLimits
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.family import Family, Settings
from fxsplit_encoder.models.later import pixel_table
from fxsplit_encoder.models.load import read_family
from fxsplit_encoder.models.prepare import ProcessorSettings
from fxsplit_encoder.models.sampling import with_sampling
from fxsplit_encoder.models.tiles import ProcessedTiles

_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"


def media_processor(
    tower: Any,
    model: str | Path | Checkpoint,
    limits: MediaLimits | None = None,
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
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.locate(model)
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
    limits: MediaLimits | None = None,
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
            return family.prepare(settings, replace(used, image={**used.image, **options}))
        return family.prepare(settings, replace(used, video=with_sampling(used.video, options)))

    described = canonical([type(whole).__qualname__, settings, given.image, given.video], "settings")
    return TowerProcessor(tower, prepare, _fingerprint(described, hash_name), limits, hash_name, tables)


def _tables(whole: Preparation, later: Preparation) -> dict[str, torch.Tensor]:
    modalities: list[Modality] = ["image", "video"] if whole.takes_clips else ["image"]
    found = {modality: pixel_table(whole, later, modality) for modality in modalities}
    return {name: torch.from_numpy(table) for name, table in found.items() if table is not None}


def tiles_processor(
    tower: Any, processor: Any, limits: MediaLimits | None = None, hash_name: HashName = "blake3"
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
    tower: Any, extractor: Any, limits: MediaLimits | None = None, hash_name: HashName = "blake3"
) -> AudioProcessor:
    """Prepares audio for a tower by a feature extractor of transformers.

    Args:
        tower: what `wrap` returns of a module that encodes pieces of audio.
        extractor: such as `WhisperFeatureExtractor.from_pretrained` returns, with `n_samples`.
        limits: for every item.
        hash_name: of the function for digests.
    """
    described = extractor.to_json_string().encode()
    return AudioProcessor(tower, extractor, _fingerprint(described, hash_name), limits, hash_name)


def _fingerprint(described: bytes, hash_name: HashName) -> bytes:
    """Of a processor with the packages that resize and normalize, whose versions may differ in a value."""
    packages = [f"{name} {version(name)}".encode() for name in ("transformers", "pillow", "numpy", "torch")]
    return digest_of([described, *packages], hash_name)
