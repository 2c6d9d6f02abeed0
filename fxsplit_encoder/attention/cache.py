"""What was measured, on disk: one file for each combination of GPU and versions."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs
import torch

from fxsplit_encoder.attention.kernels import KERNELS, AttentionShape
from fxsplit_encoder.attention.measure import Measured

logger = logging.getLogger(__name__)

# Changes when what is measured, or how it is written, does.
_FORMAT = 3

_PACKAGES = (
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "vllm",
)

Table = dict[AttentionShape, Measured]


def cache_directory() -> Path:
    """`fxsplit_encoder` where the system keeps caches: on Linux in $XDG_CACHE_HOME, or in ~/.cache."""
    return platformdirs.user_cache_path("fxsplit_encoder", appauthor=False)


def describe_environment(device: torch.device) -> dict[str, Any]:
    """What the measured times depend on."""
    cudnn: Any = torch.backends.cudnn
    return {
        "format": _FORMAT,
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
        "kernels": [kernel.name for kernel in KERNELS],
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class MeasurementCache:
    """The file of one environment. Several processes may use it at the same time: it is replaced as a whole,
    and a measurement that is lost between two processes is made again.

    Args:
        environment: what the measurements depend on.
        directory: where the file is; `cache_directory` if None.
    """

    def __init__(self, environment: Mapping[str, Any], directory: Path | None = None) -> None:
        self.environment = json.loads(json.dumps(environment))
        digest = hashlib.sha256(json.dumps(self.environment, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (directory or cache_directory()) / f"attention-{digest}.json"

    def load(self, device: torch.device) -> Table:
        """What is stored, for this device; nothing where there is no file, or none that can be read."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            return table_of(stored["classes"], device)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("%s cannot be read, so attention is measured again: %s", self.path, error)
            return {}

    def store(self, table: Table, device: torch.device) -> None:
        """Adds a table to what the file holds. A directory that cannot be written is logged once per call."""
        merged = {**self.load(device), **table}
        content = {"environment": self.environment, "classes": entries_of(merged)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.path.parent, suffix=".tmp", delete=False
            ) as file:
                json.dump(content, file, indent=1)
            os.replace(file.name, self.path)
        except OSError as error:
            logger.warning("what was measured of attention is not kept: %s", error)


def entries_of(table: Table) -> list[dict[str, Any]]:
    """A table as JSON has it, without its device."""
    return [
        {
            "shape": _fields(shape),
            "measured": {"microseconds": found.microseconds, "rejected": found.rejected},
        }
        for shape, found in table.items()
    ]


def table_of(entries: Sequence[Mapping[str, Any]], device: torch.device) -> Table:
    """The table of these entries, for a device.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: they are no such entries.
    """
    return {_shape(entry["shape"], device): Measured(**entry["measured"]) for entry in entries}


_NUMBERS = ("heads", "head_dim", "tokens", "longest", "segments", "host_lengths", "equal")


def _fields(shape: AttentionShape) -> dict[str, Any]:
    dtype = str(shape.dtype).removeprefix("torch.")
    return {"dtype": dtype, **{name: getattr(shape, name) for name in _NUMBERS}}


def _shape(fields: Mapping[str, Any], device: torch.device) -> AttentionShape:
    dtype = getattr(torch, fields["dtype"])
    return AttentionShape(device, dtype, **{name: fields[name] for name in _NUMBERS})
