"""What a saved start holds for: the device, and the versions of everything that compiles or is measured."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fxsplit_encoder.kernels import KernelMeasurements, describe_environment
from fxsplit_encoder.version import VERSION

Key = dict[str, Any]
"""Plain values by dotted names; two are compared name by name."""

_PACKAGE = Path(__file__).resolve().parents[1]


def environment_key(device: torch.device, measurements: Iterable[KernelMeasurements[Any, Any]] = ()) -> Key:
    """What has to be the same where a start is loaded. The driver is not in it: compiled kernels are binaries
    for the GPU's architecture, and of the driver need no more than this torch does.

    Args:
        measurements: those of the operations whose kernels are chosen.
    """
    key: Key = {
        "fxsplit_encoder": VERSION,
        "fxsplit_encoder.code": _own_code(),
        "python": platform.python_version().rpartition(".")[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
    }
    if device.type == "cuda":
        key["gpu.capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        measured_with = describe_environment(device)
        key["measured_with"] = {name: value for name, value in measured_with.items() if name != "gpu"}
        key |= {f"{each.shape.operation}.kernels": [k.name for k in each.kernels] for each in measurements}
        key["gpu"] = measured_with["gpu"]
    else:
        key["gpu"] = None
        key["cpu"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return plain(key)


def plain(key: Mapping[str, Any]) -> Key:
    """A key as JSON gives it back, nested mappings by dotted names."""
    flat: Key = {}
    for name, value in json.loads(json.dumps(key)).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": each for inner, each in plain(value).items()}
        else:
            flat[name] = value
    return flat


def differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """A line for each name whose values are not the same.

    Args:
        expected: what holds here.
        got: what a file says.
    """
    names = dict.fromkeys((*expected, *got))
    return [
        f"{name}: expected {_shown(expected, name)}; got {_shown(got, name)}"
        for name in names
        if (name in expected) != (name in got) or expected.get(name) != got.get(name)
    ]


def _shown(key: Mapping[str, Any], name: str) -> str:
    return json.dumps(key[name]) if name in key else "nothing"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _own_code() -> str:
    """A digest of this package's code, whose version does not change with every commit."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
