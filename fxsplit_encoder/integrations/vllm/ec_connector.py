"""`FxsplitECConnector`: vLLM's interface of encoder cache connectors, over this library's shared memory.

vLLM imports this module by `ec_connector_module_path`; nothing else does, since it imports vLLM.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)

from fxsplit_encoder.connector.transport.seam import Handle
from fxsplit_encoder.integrations.vllm.encoder_cache import (
    FoundItems,
    LoadedItems,
    OfferedItems,
    read_encoder_cache_settings,
)


@dataclass(frozen=True)
class EncoderCacheMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers, with every step."""

    loads: tuple[tuple[str, Handle], ...] = ()
    """What consumers load."""
    offers: tuple[str, ...] = ()
    """The items of new requests, which producers offer again where they have them."""


@dataclass(frozen=True)
class EncoderCacheLoaded(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """From a worker to the scheduler: what it has loaded."""

    identifiers: frozenset[str]

    def aggregate(self, other: EncoderCacheLoaded) -> EncoderCacheLoaded:
        """What either worker has loaded: all of them load the same."""
        return EncoderCacheLoaded(self.identifiers | other.identifiers)


class FxsplitECConnector(ECConnectorBase):  # type: ignore[misc]
    """One end of an engine's encoder cache, in its scheduler or in a worker: a producer, a consumer or both.

    Producers offer what they have encoded in shared memory of their own; consumers of the same host and user
    load it instead of encoding. What is not found, or was given up, a consumer encodes itself.

    Args:
        vllm_config: vLLM's configuration; `ec_connector_extra_config` holds `EncoderCacheSettings`.
        role: scheduler or worker.

    Raises:
        ConfigError: a setting is unknown or not allowed.
        InputError: the directory is not this user's alone, or there is no such memory.
    """

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        transfer, parallel = vllm_config.ec_transfer_config, vllm_config.parallel_config
        settings = read_encoder_cache_settings(transfer.ec_connector_extra_config)
        group = f"{transfer.engine_id}-{parallel.data_parallel_rank}"
        dtype = vllm_config.model_config.dtype
        is_worker = role == ECConnectorRole.WORKER
        # Ranks that share the weights have the same rows: the first of them offers them.
        offers = is_worker and self.is_producer and parallel.rank % parallel.tensor_parallel_size == 0
        self._offered = OfferedItems(settings, dtype) if offers else None
        self._loaded = LoadedItems(settings, group) if is_worker and self.is_consumer else None
        self._found = (
            FoundItems(settings, group, parallel.world_size, dtype)
            if not is_worker and self.is_consumer
            else None
        )

    # --- in workers

    def start_save_caches(self, **kwargs: Any) -> None:
        """Offers what new requests need and earlier ones had encoded; `encoder_cache` holds it."""
        if self._offered is not None and (cache := kwargs.get("encoder_cache")) is not None:
            self._offered.offer_again(self._get_connector_metadata().offers, cache)

    def save_caches(self, encoder_cache: MutableMapping[str, Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Offers what was just encoded."""
        if self._offered is not None:
            self._offered.offer(mm_hash, encoder_cache[mm_hash])

    def start_load_caches(self, encoder_cache: MutableMapping[str, Tensor], **kwargs: Any) -> None:
        """Loads what the scheduler has found.

        Raises:
            TransportError: as `LoadedItems.load`.
        """
        if self._loaded is not None:
            self._loaded.load(self._get_connector_metadata().loads, encoder_cache, _device())

    def build_connector_worker_meta(self) -> EncoderCacheLoaded | None:
        """What was loaded in this step; None: nothing."""
        loaded = self._loaded.take_loaded() if self._loaded is not None else frozenset()
        return EncoderCacheLoaded(loaded) if loaded else None

    # --- in the scheduler

    def has_cache_item(self, identifier: str) -> bool:
        """Whether an item need not be encoded."""
        return self._found is not None and self._found.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """An item of a request is loaded, or encoded, in the step that is being scheduled."""
        if self._found is not None:
            self._found.plan(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> EncoderCacheMetadata:
        """What the workers do in this step."""
        new = scheduler_output.scheduled_new_reqs if self.is_producer else ()
        offers = {feature.identifier: None for request in new for feature in request.mm_features}
        return EncoderCacheMetadata(self._found.take_planned() if self._found else (), tuple(offers))

    def update_connector_output(self, connector_output: Any) -> None:
        """Lets go of what the workers have loaded."""
        loaded = connector_output.ec_connector_worker_meta
        if self._found is not None and loaded is not None:
            self._found.release_loaded(loaded.identifiers)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Lets go of what a request did not need after all. Nothing is sent after it."""
        if self._found is not None:
            self._found.forget(feature.identifier for feature in request.mm_features)
        return False, None

    def shutdown(self) -> None:
        """Hangs up, and takes back what is offered; idempotent."""
        for part in (self._offered, self._loaded, self._found):
            if part is not None:
                part.close()


def _device() -> torch.device:
    """That of this worker, whose encoder cache lies there."""
    from vllm.platforms import current_platform

    kind: str = current_platform.device_type
    return (
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )
