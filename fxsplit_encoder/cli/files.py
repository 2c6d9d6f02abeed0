"""Files that a command takes, those that come with the package, and those that it writes."""

from __future__ import annotations

import os
from pathlib import Path

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import nearest

_PACKAGE = Path(__file__).resolve().parents[1]

ROOTS = (_PACKAGE / "data", _PACKAGE.parent)
"""Where `examples` and `configs` are: a wheel has them inside the package, a checkout beside it."""


def shipped(relative: str) -> Path:
    """A file or directory that comes with the package; raises InputError where it is not there."""
    for root in ROOTS:
        if (path := root / relative).exists():
            return path
    raise InputError(f"{relative}: not found, though it comes with every wheel and checkout; install it anew")


def read_config(given: Path | None) -> EncoderConfig | None:
    """The settings in a file, or of a name in `configs`; None: none are given. InputError: there is no such
    file and no such name. ConfigError: it holds bad settings.
    """
    if given is None:
        return None
    if given.exists():
        return EncoderConfig.from_yaml(given)
    names = sorted(path.stem for path in shipped("configs").glob("*.yaml"))
    if given.name in names and given.parent == Path():
        return EncoderConfig.from_yaml(shipped(f"configs/{given}.yaml"))
    asked = nearest(given.stem, names)
    raise InputError(f"--config {given}: no such file; {asked}expected one, or one of {', '.join(names)}")


def check_output(path: Path | None, *endings: str) -> None:
    """Raises InputError before any work is done for a file that cannot be written: a directory, one whose
    directory does not exist or takes no files, or whose name has none of the `endings`, if any are given.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"--output {path}: a directory; expected the file to write")
    if not path.parent.is_dir():
        raise InputError(f"--output {path}: no such directory: {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"--output {path}: cannot be written")
    if endings and path.suffix not in endings:
        raise InputError(f"--output {path}: expected a name that ends in {' or '.join(endings)}")
