"""What tells the inputs of runs apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fxsplit_encoder.models.checkpoint import Checkpoint

_SETTINGS = ("config.json", "processor_config.json", "preprocessor_config.json")


def paths_digest(paths: Iterable[str]) -> str:
    """Of a list of files, by their names."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def checkpoint_digest(model: str) -> str:
    """Of a checkpoint: of one on the hub by its revision, of a directory by what its settings hold, and the
    sizes and times of its weights.
    """
    checkpoint = Checkpoint.locate(model)
    digest = hashlib.sha256()
    for name in _SETTINGS:
        found = checkpoint.find(name)
        digest.update(b"" if found is None else found.read_bytes())
        if found is not None and checkpoint.directory is None:
            digest.update(found.parent.name.encode())
    if checkpoint.directory is not None:
        for weights in sorted(checkpoint.directory.glob("*.safetensors")):
            state = weights.stat()
            digest.update(f"{weights.name} {state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()
