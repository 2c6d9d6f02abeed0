"""Names of features by what they depend on: equal keys are equal features.

An item's digest covers the media's bytes, the processor and the item's own arguments; a feature's key adds
the tower and the caller's salt. Both have 32 bytes. A client's id for its media is no part of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError, MissingExtraError
from fxsplit_encoder.messages import shown

HashName = Literal["blake3", "sha256"]
"""blake3 is the faster one, sha256 the one that FIPS 140 allows."""

Part = bytes | bytearray | memoryview

_MOST_TENSOR_BYTES = 1 << 28


def _hasher(name: str, is_large: bool) -> Any:
    known: tuple[str, ...] = get_args(HashName)
    if name not in known:
        raise InputError(f"hash: expected {' or '.join(known)}; got {shown(name)}")
    if name == "sha256":
        return hashlib.sha256()
    try:
        from blake3 import blake3
    except ImportError as error:
        raise MissingExtraError("hash: blake3", "connector") from error
    return blake3(max_threads=blake3.AUTO if is_large else 1)


def digest_of(parts: Iterable[Part], name: HashName = "blake3", is_large: bool = False) -> bytes:
    """The digest of a sequence of parts: each is hashed with its length, so no two sequences run together.
    InputError: no such function.
    """
    hasher = _hasher(name, is_large)
    for part in parts:
        view = memoryview(part).cast("B")
        hasher.update(len(view).to_bytes(8, "little"))
        hasher.update(view)
    digest: bytes = hasher.digest()
    return digest


def canonical(value: object, name: str = "options") -> bytes:
    """Settings as bytes that are equal for equal settings, whatever order their names come in.

    Raises:
        InputError: it is, or holds, anything but None, booleans, numbers, strings, bytes, enumerations,
            dtypes, and sequences and mappings of them, by names or integers; messages call it `name`.
    """
    return json.dumps(_plain(value, name), sort_keys=True, separators=(",", ":")).encode()


def _plain(value: object, name: str) -> object:
    if isinstance(value, Enum):
        return _plain(value.value, name)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        if value and all(type(key) is int for key in value):  # such as transformers' id2label
            return {"": ["integers", [[key, _plain(value[key], name)] for key in sorted(value)]]}
        if not all(isinstance(key, str) for key in value):
            raise InputError(f"{name}: expected names as keys; got {shown(list(value))}")
        return {key: _plain(entry, f"{name}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, name) for entry in value]
    for kinds, plain in _KINDS:
        if isinstance(value, kinds):
            return plain(value)
    raise InputError(f"{name}: expected numbers, strings, and lists and mappings of them; got {shown(value)}")


# Tagged, so that none of them equals a string or a number that is given as such.
_KINDS: tuple[tuple[type | tuple[type, ...], Callable[[Any], object]], ...] = (
    ((bytes, bytearray), lambda value: {"": ["bytes", value.hex()]}),
    (torch.dtype, lambda value: {"": ["dtype", str(value)]}),
    (np.generic, lambda value: value.item()),
    (np.ndarray, lambda value: {"": ["array", str(value.dtype), value.tolist()]}),
)


# --- items and features


def item_digest(
    media: bytes, fingerprint: bytes, options: Mapping[str, object], name: HashName = "blake3"
) -> bytes:
    """Digest of a prepared item."""
    return digest_of([b"item", media, fingerprint, canonical(options)], name)


@dataclass(frozen=True)
class TowerIdentity:
    """A tower, as far as features depend on it."""

    weights: bytes
    """The digest of class, configuration, parameters and buffers, see `weights_digest`."""
    dtype: str
    precision: str
    """What the configuration says of how numbers are rounded, see `precision_of`."""

    @classmethod
    def of(cls, tower: nn.Module, precision: str, name: HashName = "blake3") -> TowerIdentity:
        """Identify a tower as it is now, with a `precision_of`; reads every weight once, in pieces."""
        dtype = next((str(parameter.dtype) for parameter in tower.parameters()), "none")
        return cls(weights_digest(tower, name), dtype, precision)


def precision_of(config: EncoderConfig) -> str:
    """Whether the configuration is `invariant`, which promises bits that other features do not have."""
    return "invariant" if config.invariant else ""


def feature_key(item: bytes, tower: TowerIdentity, salt: str = "", name: HashName = "blake3") -> bytes:
    """Name of a feature in a cache."""
    parts = (tower.dtype.encode(), tower.precision.encode(), salt.encode())
    return digest_of([b"feature", item, tower.weights, *parts], name)


def weights_digest(tower: nn.Module, name: HashName = "blake3") -> bytes:
    """The digest of a tower: class, configuration, parameters and buffers; InputError: one is on meta."""
    inner = getattr(tower, "tower", tower)
    settings: object = getattr(getattr(inner, "config", None), "to_dict", dict)()
    described = json.dumps(settings, sort_keys=True, default=repr)
    parts: list[Part] = [type(inner).__qualname__.encode(), described.encode()]
    tensors = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
    for key in sorted(tensors):
        parts.append(_tensor_digest(key, tensors[key], name))
    return digest_of(parts, name)


def _tensor_digest(key: str, tensor: torch.Tensor, name: HashName) -> bytes:
    if tensor.is_meta:
        raise InputError(f"{key}: expected weights; got a tensor on the meta device, which has none")
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a rank's own shard
    flat = local.detach().reshape(-1)
    parts: list[Part] = [key.encode(), f"{tuple(tensor.shape)} {tensor.dtype}".encode()]
    step = max(1, _MOST_TENSOR_BYTES // max(1, flat.element_size()))
    for start in range(0, flat.numel(), step):  # a tensor on a device is never on the host as a whole
        piece = flat[start : start + step].cpu().view(torch.uint8)
        parts.append(digest_of([piece.numpy().data], name, is_large=True))
    return digest_of(parts, name)
