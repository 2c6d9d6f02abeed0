"""Store measurements, a file an operation, and compiled kernels for processes with the same GPU and versions.

A `KernelStore` is a directory that no other user can write, named by the environment for which it holds.
"""

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
from typing import Any

import platformdirs
import torch

from fxsplit_encoder.kernels.kernel import ShapeT
from fxsplit_encoder.kernels.meter import Measured

logger = logging.getLogger(__name__)

# Changes when what is measured, or how it is written, does.
_FORMAT = 6

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
    """Returns the GPU and the versions on which measured times of every operation depend."""
    cudnn: Any = torch.backends.cudnn
    return {
        "format": _FORMAT,
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
        "packages": {name: found for name in _PACKAGES if (found := package_version(name)) is not None},
    }


def describe_host(device: torch.device) -> dict[str, Any]:
    """`describe_environment` and the driver, which decides what can run."""
    try:
        driver = _DRIVER.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        driver = None
    return {**describe_environment(device), "driver": driver}


def package_version(package: str) -> str | None:
    """The version of an installed package; in an unusual folder QuACK compiles no epilogue that calls it."""
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    folders = Path(str(found.locate_file(""))).parts
    is_usual = "site-packages" in folders or "dist-packages" in folders
    return found.version if is_usual else f"{found.version}, outside site-packages"


def digest_of(environment: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that name an environment."""
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:16]


class KernelStore:
    """Files of one kind for one environment, a JSON object, that several processes may read and write."""

    most_files = 1024  # a plan of cuDNN takes some 92 kB, and a service may meet any number of shapes

    def __init__(self, kind: str, environment: Mapping[str, Any], root: Path | None = None) -> None:
        self.environment = json.loads(json.dumps(environment))
        self.directory = (root or cache_directory()) / kind / digest_of(self.environment)

    @property
    def takes_locks(self) -> bool:
        """Whether a package that locks its files may use the directory, which is made."""
        try:
            import fcntl

            self._make()
            with tempfile.TemporaryFile(dir=self.directory) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (OSError, ImportError):
            return False
        return True

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None: there is none, or it is damaged, which is logged."""
        path = self.directory / name
        try:
            check_trusted(self.directory)
            content = unsealed(path.read_bytes())
        except OSError:
            return None
        if content is None:
            logger.warning("%s is damaged, so what it held is made anew", path)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Replaces a file; OSError says why it cannot be written."""
        path = self.directory / name
        self._make()
        if not path.exists() and sum(1 for _ in os.scandir(self.directory)) >= self.most_files:
            raise OSError(f"{self.directory} is full: it has {self.most_files} files")
        write_atomic(path, sealed(content))

    def _make(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_trusted(self.directory)  # files may be code

    def read_table(self, shape: type[ShapeT], device: torch.device) -> dict[ShapeT, Measured]:
        """The measurements of an operation; empty if nothing can be read."""
        content = self.read(f"{shape.operation}.json")
        try:
            return table_of(json.loads(content)["classes"], shape, device) if content is not None else {}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("what was measured of %s cannot be read: %s", shape.operation, error)
            return {}

    def add_to_table(
        self, table: Mapping[ShapeT, Measured], shape: type[ShapeT], device: torch.device
    ) -> None:
        """Adds measurements of an operation to its file; a file that cannot be written is logged."""
        merged = {**self.read_table(shape, device), **table}
        content = {"environment": self.environment, "classes": entries_of(merged)}
        try:
            self.write(f"{shape.operation}.json", json.dumps(content, indent=1).encode())
        except OSError as error:
            logger.warning("what was measured of %s is not kept: %s", shape.operation, error)


def check_trusted(path: Path) -> None:
    """Raises PermissionError where users other than this one and root can write a file or a directory, or put
    another file in its place. In a directory with the sticky bit they cannot.
    """
    _check_own(path, path.stat())
    folder = path.parent.stat()
    if not path.is_dir() and not folder.st_mode & stat.S_ISVTX:
        _check_own(path.parent, folder)


def _check_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path}: others can write there")


def sealed(content: bytes) -> bytes:
    """Returns a file's content after a line with its SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unsealed(stored: bytes) -> bytes | None:
    """Returns the content of a sealed file; None: it is damaged, or was never sealed."""
    content = stored.partition(b"\n")[2]
    return content if stored == sealed(content) else None


def entries_of(table: Mapping[ShapeT, Measured]) -> list[dict[str, Any]]:
    """Returns a table as JSON has it, without its device and without failures, which may not come again."""
    entries = []
    for shape, found in table.items():
        kept = {name: reason for name, reason in found.rejected.items() if name not in found.failed}
        measured = {**asdict(found), "rejected": kept, "failed": []}
        entries.append({"shape": shape.to_json(), "measured": measured})
    return entries


def table_of(
    entries: Sequence[Mapping[str, Any]], shape: type[ShapeT], device: torch.device
) -> dict[ShapeT, Measured]:
    """Returns the table of these entries, for a device; raises as `CallShape.from_json`, and ValueError."""
    return {shape.from_json(entry["shape"], device): Measured(**entry["measured"]) for entry in entries}


def write_atomic(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replaces a file at once, after the content is on disk if `durable`. OSError leaves the old."""
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
