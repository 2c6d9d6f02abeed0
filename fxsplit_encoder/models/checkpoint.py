"""The files of a checkpoint, a directory or a repository on the Hugging Face hub, and its tensors' names.

Some checkpoints are published under other names than their tower has, with fused projections and rotary pairs
in another order. The renamings of the families are what transformers' own loader, which loads whole models
only, does for these model types (`transformers.conversion_mapping`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.prepare import ProcessorSettings

Renames = Sequence[tuple[str, str]]
"""(pattern, replacement), applied one after the other."""

logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class Checkpoint:
    """Where the files of a model come from; only those that are asked for are fetched."""

    model: str
    directory: Path | None
    """None: `model` is a name on the hub."""

    @classmethod
    def locate(cls, model: str | Path | Checkpoint) -> Checkpoint:
        """The checkpoint in a directory, or else under a hub name; one that was found already as it is.

        Raises:
            InputError: no such directory, and not such a name.
        """
        if isinstance(model, Checkpoint):
            return model
        path = Path(model)
        if path.is_dir():
            return cls(str(model), path)
        if isinstance(model, Path) or path.exists() or not _HUB_NAME.fullmatch(model):
            raise InputError(f"{model}: no such directory; expected one, or a hub name such as owner/model")
        return cls(model, None)

    def find(self, file_name: str) -> Path | None:
        """The local path of a file; None if the checkpoint has no such file.

        Raises:
            InputError: the hub could not be asked.
        """
        if self.directory is not None:
            path = self.directory / file_name
            return path if path.is_file() else None
        return _fetch(self.model, file_name)

    def read_json(self, file_name: str) -> Mapping[str, Any] | None:
        """The contents of a JSON file; None if the checkpoint has no such file.

        Raises:
            InputError: the file does not hold a JSON object.
        """
        path = self.find(file_name)
        if path is None:
            return None
        try:
            contents = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(contents, dict):
            raise InputError(f"{path}: expected a JSON object; got {type(contents).__name__}")
        return contents

    def processors(self) -> ProcessorSettings:
        """What the files of its image and video processors set, and transformers' image processor of them.

        By transformers' order: the joint file goes before those of one processor, and a video processor
        without a file of its own is set by the image processor's.
        """
        joint = self.read_json("processor_config.json") or {}
        alone = self.read_json("preprocessor_config.json")
        image = joint.get("image_processor") or alone or {}
        video = (
            joint.get("video_processor") or self.read_json("video_preprocessor_config.json") or alone or {}
        )
        # Without its name transformers guesses one by the model's type, with that one's defaults.
        named = "image_processor_type" in image
        return ProcessorSettings(image, video, self._image_processor() if named else None)

    def _image_processor(self) -> Any:
        """What users of the model get, on torchvision where that is installed; None: transformers knows no
        such processor, or is of a version that imports none without torchvision.
        """
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self.directory or self.model, trust_remote_code=False)
        except (ImportError, OSError, ValueError, KeyError) as error:
            logger.info("%s: its image processor is not made by transformers: %s", self.model, error)
            return None


def _fetch(repository: str, file_name: str) -> Path | None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.hf_hub_download(repository, file_name))
    except LocalEntryNotFoundError as error:
        reason = f"the hub cannot be reached: {_first_line(error)}"
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = f"the hub refuses: {_first_line(error)}"
    raise InputError(f"{repository}: no such directory, and {reason}")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# --- names


def rename(name: str, renames: Renames) -> str:
    """A tensor's name in the tower; one that is the tower's already stays."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def split_fused(tensors: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """Fused projections (`qkv`) as three, those of queries and keys in the order of split rotary halves.

    The checkpoint rotates neighboring channels of a head together, the tower the two halves of a head: the
    even channels come first, then the odd ones.
    """
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".qkv." not in name:
            split[name] = tensor
            continue
        query, key, value = tensor.chunk(3)
        parts = {"q_proj": _halves(query, num_heads), "k_proj": _halves(key, num_heads), "v_proj": value}
        split.update({name.replace(".qkv.", f".{part}."): own for part, own in parts.items()})
    return split


def _halves(projection: Tensor, num_heads: int) -> Tensor:
    pairs = projection.view(num_heads, -1, 2, *projection.shape[1:])
    return pairs.transpose(1, 2).reshape(projection.shape)
