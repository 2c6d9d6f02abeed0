"""`VllmEncoderManager`: what vLLM's runners call in place of vLLM's own encoder CUDA graph manager."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import CaptureError, InputError, RankError
from fxsplit_encoder.integrations.vllm.compatibility import logger, warn_once
from fxsplit_encoder.integrations.vllm.known_grids import keep_metadata
from fxsplit_encoder.integrations.vllm.layers import noting_bounds
from fxsplit_encoder.integrations.vllm.settings import VARIABLE, encoder_config
from fxsplit_encoder.manager import EncoderCudaGraphManager

# Under this name a model keeps its manager from `clear` until one is made for it again: vLLM measures what
# graphs take by captures that it throws away, and the runner of the first generation makes another manager
# for those that serve.
_CLEARED = "_fxsplit_encoder_cleared"


class _Served:
    """An attribute of vLLM's manager: this library's value for as long as this library serves."""

    def __init__(self, read: Callable[[EncoderCudaGraphManager], Any]) -> None:
        self._read = read
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, adapter: Any, owner: type) -> Any:
        if adapter is not None and adapter.manager is not None:
            return self._read(adapter.manager)
        try:
            return vars(adapter)[self._name]
        except (KeyError, TypeError):
            raise AttributeError(f"{owner.__name__} has no {self._name}") from None

    def __set__(self, adapter: Any, value: Any) -> None:
        vars(adapter)[self._name] = value


class VllmEncoderManager:
    """vLLM's manager of encoder CUDA graphs, by this library's; by vLLM's own wherever this one fails.

    `make_adapter` derives the class from this and from vLLM's own, whose constructor may raise. `model`
    implements vLLM's `SupportsEncoderCudaGraph`.
    """

    settings: ClassVar[EncoderConfig]
    manager: EncoderCudaGraphManager | None = None
    """This library's; None where vLLM's own serves."""

    token_budgets = _Served(
        lambda manager: sorted({b for path in manager.limits.path_budgets.values() for b in path})
    )
    path_token_budgets = _Served(
        lambda manager: {
            name: [0] * (name in manager.limits.skippable_paths) + list(budgets)
            for name, budgets in manager.limits.path_budgets.items()
        }
    )
    max_batch_size = _Served(lambda manager: manager.limits.max_items_per_batch)
    max_frames_per_batch = _Served(lambda manager: manager.limits.max_frames_per_batch)
    budget_graphs = _Served(lambda manager: manager.budget_graphs)
    graph_pool = _Served(lambda manager: manager.pool.handle if manager.is_captured() else None)
    graph_hits = _Served(lambda manager: manager.stats().hits)
    graph_misses = _Served(lambda manager: sum(manager.stats().misses.values()))

    def __new__(cls, *args: Any, **kwargs: Any) -> VllmEncoderManager:
        """An object of this class, and not what a `StandIn` makes."""
        return object.__new__(cls)

    def __init__(self, vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any) -> None:
        self._inherited.__init__(vllm_config=vllm_config, device=device, dtype=dtype, model=model)
        self.num_left = 0
        """Batches that `execute` left to vLLM's eager forward: nothing was captured, or it failed."""
        self._is_data_parallel = sharing_of(vllm_config) == "data"
        if (reason := reason_to_leave(vllm_config, torch.device(device))) is not None:
            warn_once(f"vLLM's own manager captures the encoder: {reason}")
            return

        def make() -> None:
            self.manager = self._make(vllm_config, device, dtype, model)

        self._attempt(make)

    @property
    def _inherited(self) -> Any:
        """The methods of vLLM's own manager, of this object."""
        return super()

    def _make(
        self, vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any
    ) -> EncoderCudaGraphManager:
        config, group = encoder_config(self.settings, vllm_config, model), None
        if self._is_data_parallel:
            config, group = config.replace(data_parallel=True), device_group()
        note_reloads(model, self._check_weights)
        keep_metadata(model)
        cleared: EncoderCudaGraphManager | None = vars(model).pop(_CLEARED, None)
        if cleared is not None and cleared.config == config:
            return cleared
        logger.info("encoder CUDA graphs by fxsplit_encoder (%s=off: by vLLM): %s", VARIABLE, config)
        return EncoderCudaGraphManager(
            model, config, device=device, dtype=dtype, vllm_config=vllm_config, process_group=group
        )

    def _check_weights(self) -> None:
        if self.manager is not None:
            self.manager.check_weights()

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Whether an action succeeded, on every rank that shares the items. If not, vLLM's own manager takes
        over.
        """
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        if self._is_data_parallel and not all_agree(failure is None) and failure is None:
            failure = RankError("another rank could not, and says why")
        if failure is None:
            return True
        if self.manager is not None:
            self.manager.clear()
        self.manager = None
        warn_once(
            "vLLM's own manager captures the encoder, since fxsplit_encoder could not: "
            f"{type(failure).__name__}: {failure}"
        )
        return False

    # --- what runners call

    def get_num_graphs_to_capture(self) -> int:
        """Captures that `capture` makes, over all paths and axes."""
        if self.manager is None:
            return int(self._inherited.get_num_graphs_to_capture())
        return self.manager.planned_captures().num_graphs

    def supports_modality(self, modality: str) -> bool:
        """Whether captures serve "image" or "video" inputs."""
        return bool((self.manager or self._inherited).supports_modality(modality))

    def is_captured(self) -> bool:
        """Whether `capture` has run since the last `clear`."""
        return bool((self.manager or self._inherited).is_captured())

    def capture(self, graph_pool: Any = None) -> None:
        """Captures every budget, reusing what a cleared capture of the same model compiled and measured.
        `graph_pool` is for vLLM's own manager: this library's captures have another.
        """
        manager = self.manager
        if manager is None or not self._attempt(lambda: self._capture(manager)):
            self._inherited.capture(graph_pool=graph_pool)

    def _capture(self, manager: EncoderCudaGraphManager) -> None:
        vars(manager.tower).pop(_CLEARED, None)
        if manager.config.compile:
            _note_bounds(manager)
        manager.capture()
        if manager.model_config.modalities and not manager.can_replay():
            raise CaptureError("; ".join(manager.reports) or "no budget could be captured")
        if manager.device.type == "cuda":  # what runs that were timed have left is not the captures' memory
            torch.cuda.empty_cache()

    def clear(self) -> None:
        """Releases every capture; `capture` may be called again, of this or another manager of the model."""
        manager = self.manager
        if manager is None:
            self._inherited.clear()
            return
        if manager.is_captured():
            for path in manager.paths_by_key.values():
                path.expect(path.known())
        manager.clear()
        vars(manager.tower)[_CLEARED] = manager

    def execute(self, mm_kwargs: dict[str, Any]) -> list[Tensor] | None:
        """Encodes a batch: a tensor an item, (output tokens, hidden); None: vLLM has to encode the batch
        eagerly.
        """
        if self.manager is None:
            outputs: list[Tensor] | None = self._inherited.execute(mm_kwargs)
            return outputs
        if self.manager.is_captured():
            try:
                return self.manager.execute(mm_kwargs)
            except Exception as error:  # vLLM's eager forward may still do it, or say better what is wrong
                warn_once(f"a batch is encoded eagerly: {type(error).__name__}: {error}")
        self.num_left += 1
        return None

    def get_cumulative_stats(self) -> dict[str, Any]:
        """Items so far, under vLLM's names; and the batches that were left to vLLM's eager forward."""
        if self.manager is None:
            stats: dict[str, Any] = self._inherited.get_cumulative_stats()
            return stats
        own = self.manager.stats()
        return {
            "graph_hits": own.hits,
            "graph_misses": own.items - own.hits,
            "hit_rate": own.hit_rate,
            "num_budgets": sum(len(path) for path in self.manager.budget_graphs.values()),
            "token_budgets": self.token_budgets,
            "batches_left": self.num_left,
        }


def make_adapter(vllm_class: Any, settings: EncoderConfig) -> type[VllmEncoderManager]:
    """The class of managers in place of vLLM's, or of those of a `StandIn`."""
    return type(vllm_class.__name__, (VllmEncoderManager, vllm_class), {"settings": settings})


def _note_bounds(manager: EncoderCudaGraphManager) -> None:
    """Runs the encoder at two sizes, to learn how long segments are that are the same at any."""
    with noting_bounds(), torch.inference_mode(False), torch.no_grad():
        for path in manager.paths_by_key.values():
            for budget in {path.budgets[0], path.budgets[-1]} if path.budgets else ():
                with contextlib.suppress(InputError):
                    path(path.capture_values(budget))


# --- what is left to vLLM's own manager


def reason_to_leave(vllm_config: Any, device: torch.device) -> str | None:
    """Why this library does not serve an engine of this configuration; None: it does."""
    if device.type not in ("cuda", "cpu") or torch.version.hip:
        return f"devices of type {'rocm' if torch.version.hip else device.type} are not supported"
    if sharing_of(vllm_config) == "weights":
        return (
            "ranks share its weights, and have to capture the same; with --mm-encoder-tp-mode data they "
            "share the images instead"
        )
    lora = vllm_config.lora_config
    if lora is not None and getattr(lora, "enable_tower_connector_lora", False):
        return "its LoRA adapters belong to images by their order, which packing changes"
    return None


# --- vLLM's tensor parallel group


def sharing_of(vllm_config: Any) -> Literal["data", "weights"] | None:
    """What ranks share: the items of a batch, each with a whole encoder, or its weights; None: it is one."""
    if vllm_config.parallel_config.tensor_parallel_size < 2:
        return None
    multimodal = vllm_config.model_config.multimodal_config
    return "data" if multimodal is not None and multimodal.mm_encoder_tp_mode == "data" else "weights"


def device_group() -> dist.ProcessGroup:
    """The group over which ranks exchange rows."""
    from vllm.distributed import get_tp_group

    group: dist.ProcessGroup = get_tp_group().device_group
    return group


def all_agree(ready: bool) -> bool:
    """Whether every rank says yes, as a call that all of them must make."""
    from vllm.distributed import get_tp_group

    vote = torch.tensor([int(ready)], device="cpu")
    dist.all_reduce(vote, dist.ReduceOp.MIN, get_tp_group().cpu_group)
    return bool(vote.item())


# --- weights that vLLM loads into a model that runs


def note_reloads(model: Any, then: Callable[[], None]) -> None:
    """Has every later `model.load_weights` call `then` at its end, once.

    vLLM copies new weights through `parameter.data`, which leaves no version, some of them after that end.
    """
    load: Any = getattr(model, "load_weights", None)
    if load is None:
        return
    if hasattr(load, "after_load"):
        load.after_load = then
        return

    @functools.wraps(load)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        finally:
            vars(load_weights)["after_load"]()

    vars(load_weights)["after_load"] = then
    model.load_weights = load_weights
