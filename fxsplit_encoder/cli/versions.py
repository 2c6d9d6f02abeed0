"""Which versions a report of a problem has to name."""

from __future__ import annotations

import platform
from importlib import metadata

from fxsplit_encoder import __version__
from fxsplit_encoder.cli.usage import PROGRAM


def versions() -> str:
    """This command's, and those of what it runs on, in one line."""
    found = [f"{PROGRAM} {__version__}"]
    for package in ("torch", "transformers"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join([*found, f"Python {platform.python_version()}"])
