"""Measurements of kernels on disk: a file for each GPU and versions, with a section for each operation."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Generic

import platformdirs
import torch

from fxsplit_encoder.kernels.kernel import ShapeT
from fxsplit_encoder.kernels.meter import Measured

logger = logging.getLogger(__name__)

# Changes when what is measured, or how it is written, does.
_FORMAT = 5

_PACKAGES = (
    "apache-tvm-ffi",
    "einops",
    "flash-attn-4",
    "nvidia-cublas",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu13",
    "nvmath-python",
    "quack-kernels",
    "torch-c-dlpack-ext",
    "triton",
    "vllm",
)

_DRIVER = Path("/proc/driver/nvidia/version")


def cache_directory() -> Path:
    """`fxsplit_encoder` where the system keeps caches: on Linux in $XDG_CACHE_HOME, or in ~/.cache."""
    return platformdirs.user_cache_path("fxsplit_encoder", appauthor=False)


def describe_environment(device: torch.device) -> dict[str, Any]:
    """What the measured times of every operation depend on."""
    cudnn: Any = torch.backends.cudnn
    return {
        "format": _FORMAT,
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def describe_host(device: torch.device) -> dict[str, Any]:
    """`describe_environment` with what the system says of its driver, on which depends what can be run."""
    try:
        driver = _DRIVER.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        driver = None
    return {**describe_environment(device), "driver": driver}


def digest_of(environment: Mapping[str, Any]) -> str:
    """Tells what `describe_environment` describes from others, in names of files."""
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:16]


def why_not_private(directory: Path) -> str:
    """Why code should not be read from a directory, which is made if missing; empty: only this user can write
    there.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "others can write there"
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return str(error)


def _version(package: str) -> str | None:
    """Says where a package's folder has an unusual name: QuACK compiles no epilogue that calls it then."""
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    folders = Path(str(found.locate_file(""))).parts
    is_usual = "site-packages" in folders or "dist-packages" in folders
    return found.version if is_usual else f"{found.version}, outside site-packages"


class MeasurementCache(Generic[ShapeT]):
    """The section of one operation in the file of one environment. Several processes may use it: it is
    replaced as a whole, and a measurement that is lost between two writers is made again.

    Args:
        shape: what the classes of calls are.
        kernels: the names of all candidates. What other ones were measured is not loaded.
        directory: where the file is; `cache_directory` if None.
    """

    def __init__(
        self,
        environment: Mapping[str, Any],
        shape: type[ShapeT],
        kernels: Sequence[str],
        directory: Path | None = None,
    ) -> None:
        self.environment = json.loads(json.dumps(environment))
        self._shape = shape
        self._kernels = list(kernels)
        self.path = (directory or cache_directory()) / f"kernels-{digest_of(self.environment)}.json"

    def load(self, device: torch.device) -> dict[ShapeT, Measured]:
        """What is stored, for this device; nothing where there is no file, or none that can be read."""
        try:
            section = self._operations().get(self._shape.operation, {})
            if section.get("kernels") != self._kernels:
                return {}
            return table_of(section["classes"], self._shape, device)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            name = self._shape.operation
            logger.warning("%s cannot be read, so %s is measured again: %s", self.path, name, error)
            return {}

    def store(self, table: Mapping[ShapeT, Measured], device: torch.device) -> None:
        """Adds a table to what the file holds. A directory that cannot be written is logged once per call."""
        merged = {**self.load(device), **table}
        section = {"kernels": self._kernels, "classes": entries_of(merged)}
        operations = {**self._other_operations(), self._shape.operation: section}
        content = {"environment": self.environment, "operations": operations}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(content, indent=1).encode())
        except OSError as error:
            logger.warning("what was measured of %s is not kept: %s", self._shape.operation, error)

    def _operations(self) -> dict[str, Any]:
        stored = json.loads(self.path.read_text(encoding="utf-8"))
        return dict(stored["operations"])

    def _other_operations(self) -> dict[str, Any]:
        """What the file holds of others, as it is: nothing where it cannot be read, which `load` says."""
        try:
            return self._operations()
        except (OSError, ValueError, TypeError, KeyError):
            return {}


def entries_of(table: Mapping[ShapeT, Measured]) -> list[dict[str, Any]]:
    """A table as JSON has it, without its device."""
    return [{"shape": shape.to_json(), "measured": asdict(found)} for shape, found in table.items()]


def table_of(
    entries: Sequence[Mapping[str, Any]], shape: type[ShapeT], device: torch.device
) -> dict[ShapeT, Measured]:
    """The table of these entries, for a device; raises as `CallShape.from_json`, and ValueError."""
    return {shape.from_json(entry["shape"], device): Measured(**entry["measured"]) for entry in entries}


def write_atomic(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replaces a file: a reader finds the old content or all of the new.

    Args:
        path: in a directory that exists. Its name ends the temporary file's, which begins with a dot.
        durable: whether the content is on disk before the old is replaced.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.name)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(descriptor)
        os.chmod(partial, 0o644)  # a temporary file is its owner's alone
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)
        raise
