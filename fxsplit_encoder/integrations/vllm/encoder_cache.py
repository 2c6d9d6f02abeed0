"""Encoder outputs from one vLLM engine to another of this host, through shared memory.

What an EC connector of vLLM does in each of its processes, without vLLM's own types.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from fxsplit_encoder.connector.store import FeatureStore, Stores
from fxsplit_encoder.connector.transport.private_directory import default_root
from fxsplit_encoder.connector.transport.seam import Handle
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.integrations.vllm.log import logger, warn_once
from fxsplit_encoder.settings_model import Bytes, Settings, parse_bytes

_ROWS = "rows"


def _default_directory() -> Path:
    return default_root() / f"fxsplit_encoder_vllm_{os.getuid()}"


class EncoderCacheSettings(Settings):
    """What `ec_connector_extra_config` holds. Immutable.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed.
    """

    directory: Path = Field(default_factory=_default_directory)
    """In which producers have their sockets and consumers find them: of one user alone (mode 0700), and made
    if it is not there."""

    max_bytes: Annotated[Bytes, BeforeValidator(parse_bytes)] = 4 << 30
    """Shared memory of a producer, in bytes or as a size such as 4GiB. What was used longest ago is given up
    for what comes."""


def read_encoder_cache_settings(extra: Mapping[str, Any]) -> EncoderCacheSettings:
    """The settings of an engine.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed.
    """
    try:
        return EncoderCacheSettings(**extra)
    except ConfigError as error:
        raise ConfigError(*(f"ec_connector_extra_config: {problem}" for problem in error.problems)) from None


def key_of(identifier: str, dtype: torch.dtype) -> bytes:
    """What an item is found by: vLLM's identifier, which tells its content, its model and their options, and
    the dtype that the engine computes in.
    """
    return f"{str(dtype).removeprefix('torch.')}:{identifier}".encode()


class OfferedItems:
    """The items of a producer, in its worker.

    Args:
        dtype: that the engine computes in.
    """

    def __init__(self, settings: EncoderCacheSettings, dtype: torch.dtype) -> None:
        self._store = FeatureStore(settings.directory, settings.max_bytes)
        self._dtype = dtype

    def offer(self, identifier: str, rows: Tensor) -> None:
        """Copies an item's rows to shared memory, unless it is there. What has no room is left out: consumers
        encode it themselves.
        """
        try:
            if not self._store.put(key_of(identifier, self._dtype), {_ROWS: rows.detach()}):
                warn_once("an encoded item is not offered: consumers hold all of max_bytes; raise it")
        except InputError as error:
            warn_once(f"an encoded item is not offered: {error}")

    def offer_again(self, identifiers: Iterable[str], encoder_cache: Mapping[str, Tensor]) -> None:
        """Offers what the engine has encoded before, of the items of new requests."""
        for identifier in identifiers:
            if identifier in encoder_cache:
                self.offer(identifier, encoder_cache[identifier])

    def close(self) -> None:
        """Takes back the offers; idempotent. What consumers have found stays readable to them."""
        logger.info("encoder cache, offered: %s", self._store.stats())
        self._store.close()


class FoundItems:
    """The items that a consumer's scheduler has found, held until its workers have loaded them.

    Args:
        group: one name for the scheduler and the workers of an engine.
        num_workers: that load every item. All of them have to have mapped a producer's memory before an item
            of its counts as found, since its process may end at any time.
        dtype: that the engine computes in.
    """

    def __init__(
        self, settings: EncoderCacheSettings, group: str, num_workers: int, dtype: torch.dtype
    ) -> None:
        self._stores = Stores(settings.directory, group, is_mapping=False)
        self._num_workers = num_workers
        self._dtype = dtype
        self._found: dict[str, Handle] = {}
        self._planned: list[tuple[str, Handle]] = []
        """To be loaded in the step that is being scheduled."""
        self._loading: dict[str, deque[Handle]] = {}
        self.counts: Counter[str] = Counter()

    def has(self, identifier: str) -> bool:
        """Whether an item can be loaded; from now on it is held."""
        if identifier in self._found:
            return True
        found = self._stores.find(key_of(identifier, self._dtype))
        if found is None:
            return False
        if found.num_mapping < self._num_workers:
            self.counts["not mapped by every worker"] += 1
            self._stores.release(found.handle)
            return False
        self._found[identifier] = found.handle
        return True

    def plan(self, identifier: str) -> None:
        """An item gets a place in the engine's encoder cache: it is loaded in this step if it was found, and
        else encoded.
        """
        handle = self._found.pop(identifier, None)
        self.counts["encoded here" if handle is None else "loaded"] += 1
        if handle is not None:
            self._planned.append((identifier, handle))

    def take_planned(self) -> tuple[tuple[str, Handle], ...]:
        """What the workers load in this step."""
        planned, self._planned = tuple(self._planned), []
        for identifier, handle in planned:
            self._loading.setdefault(identifier, deque()).append(handle)
        return planned

    def release_loaded(self, identifiers: Iterable[str]) -> None:
        """Every worker has loaded these in one step."""
        for identifier in identifiers:
            handles = self._loading.get(identifier)
            if handles:
                self._stores.release(handles.popleft())
            if not handles:
                self._loading.pop(identifier, None)

    def forget(self, identifiers: Iterable[str]) -> None:
        """The request that asked for these has ended; another one finds them again."""
        for identifier in identifiers:
            handle = self._found.pop(identifier, None)
            if handle is not None:
                self._stores.release(handle)

    @property
    def num_held(self) -> int:
        """Items that producers keep for this engine."""
        return len(self._found) + len(self._planned) + sum(map(len, self._loading.values()))

    def close(self) -> None:
        """Releases everything; idempotent."""
        if self.counts:
            logger.info("encoder cache, items: %s", dict(self.counts))
        self._stores.close()


class LoadedItems:
    """Loads what the scheduler has found, in a consumer's worker.

    Args:
        group: as for `FoundItems`.
    """

    def __init__(self, settings: EncoderCacheSettings, group: str) -> None:
        self._stores = Stores(settings.directory, group, is_watching=True)
        self._loaded: set[str] = set()

    def load(
        self,
        items: Iterable[tuple[str, Handle]],
        encoder_cache: MutableMapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """Copies items into the engine's encoder cache, each (output tokens, hidden) on `device`.

        Raises:
            TransportError: a producer's memory is gone, which is kept for a minute after its process.
        """
        for identifier, handle in items:
            if identifier not in encoder_cache:
                if device.type == "cpu":
                    encoder_cache[identifier] = self._stores.get(handle).buffers[_ROWS]
                else:  # straight from the shared memory, which may be given up once this has returned
                    encoder_cache[identifier] = self._stores.view(handle).buffers[_ROWS].to(device)
            self._loaded.add(identifier)

    def take_loaded(self) -> frozenset[str]:
        """What was loaded since this was asked last."""
        loaded, self._loaded = frozenset(self._loaded), set()
        return loaded

    def close(self) -> None:
        """Hangs up; idempotent."""
        self._stores.close()
