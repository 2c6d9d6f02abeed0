"""What every stored figure carries: hardware, versions, commit; and how tables say it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

_ATTENTION_PACKAGES = ("flash-attn-4", "nvidia-cudnn-frontend", "flash-attn-3", "flash-attn", "vllm")
ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, Any]:
    """GPU, driver, versions and commit of this run.

    A host may have the files without the repository; there FXSPLIT_COMMIT names the commit.
    """
    cuda = torch.cuda.is_available()
    commit = os.environ.get("FXSPLIT_COMMIT") or commit_of(ROOT)
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"])
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": driver if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "attention packages": _attention_packages(),
        "python": platform.python_version(),
        "commit": commit,
    }


def commit_of(root: Path) -> str | None:
    """The commit of a checkout; None for a folder that is none, be it inside of another checkout."""
    git = ["git", "-C", str(root), "rev-parse"]
    top = _output([*git, "--show-toplevel"])
    return _output([*git, "HEAD"]) if top and Path(top).resolve() == root.resolve() else None


def in_words(stored: Mapping[str, Any], *more: str) -> str:
    """Where stored figures are from, in one line; `more`: what they are of."""
    driver = f", driver {stored['driver']}" if stored["driver"] else ""
    packages = {"torch": stored["torch"], "transformers": stored["transformers"]}
    packages |= {**stored.get("attention packages", {}), "Python": stored["python"]}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    commits = " and ".join(commit[:9] for commit in str(stored["commit"] or "unknown").split(", "))
    return ", ".join([f"{stored['gpu'] or 'CPU'}{driver}", *more, versions, f"commit {commits}"])


def _attention_packages() -> dict[str, str]:
    """Those of the optional ones that are installed."""
    found = {}
    for name in _ATTENTION_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
