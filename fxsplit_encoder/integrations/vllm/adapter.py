"""`VllmEncoderManager`: what vLLM's runners call in place of vLLM's own encoder CUDA graph manager."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxsplit_encoder.errors import CaptureError, InputError, RankError
from fxsplit_encoder.integrations.vllm.attention import noting_bounds
from fxsplit_encoder.integrations.vllm.known_grids import keep_metadata
from fxsplit_encoder.integrations.vllm.leave import reason_to_leave
from fxsplit_encoder.integrations.vllm.log import logger, warn_once
from fxsplit_encoder.integrations.vllm.ranks import all_agree, device_group, is_data_parallel
from fxsplit_encoder.integrations.vllm.reloads import note_reloads
from fxsplit_encoder.integrations.vllm.settings import (
    VARIABLE,
    PluginSettings,
    encoder_config,
    needs_range,
)
from fxsplit_encoder.manager import EncoderCudaGraphManager
from fxsplit_encoder.manager.rehearsal import Rehearsal

# Both of vLLM's runners measure what CUDA graphs take inside a function of this name, by captures that they
# throw away.
_PROFILING = "profile_cudagraph_memory"


class VllmEncoderManager:
    """vLLM's manager of encoder CUDA graphs, by this library's; by vLLM's own wherever this one fails.

    The constructor and the members are those that vLLM's runners use. `make_adapter` derives the class that
    a `StandIn` makes in place of a vLLM's.

    Args:
        vllm_config: vLLM's configuration.
        device, dtype: where and in what the encoder computes.
        model: implements vLLM's `SupportsEncoderCudaGraph`.

    Raises:
        Whatever vLLM's own constructor raises for this configuration.
    """

    vllm_class: ClassVar[Callable[..., Any]]
    """vLLM's own."""
    settings: ClassVar[PluginSettings]

    def __init__(self, vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any) -> None:
        self.vllm_manager = type(self).vllm_class(
            vllm_config=vllm_config, device=device, dtype=dtype, model=model
        )
        self.manager: EncoderCudaGraphManager | None = None
        """This library's; None where vLLM's own serves."""
        self.num_left = 0
        """Batches that `execute` left to vLLM's eager forward: nothing was captured, or it failed."""
        self._is_data_parallel = is_data_parallel(vllm_config)
        self._rehearsal: Rehearsal | None = None
        if (reason := reason_to_leave(vllm_config, torch.device(device))) is not None:
            warn_once(f"vLLM's own manager captures the encoder: {reason}")
            return

        def make() -> None:
            self.manager = self._make(vllm_config, device, dtype, model)

        self._attempt(make)

    def _make(
        self, vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any
    ) -> EncoderCudaGraphManager:
        model_config, own = model.get_encoder_cudagraph_config(), self.settings.encoder
        asks = needs_range(own, vllm_config, model_config)
        budget_range = model.get_encoder_cudagraph_budget_range(vllm_config) if asks else None
        config = encoder_config(own, vllm_config, model_config, budget_range)
        group = None
        if self._is_data_parallel:
            config, group = config.replace(data_parallel=True), device_group()
        note_reloads(model, self._check_weights)
        keep_metadata(model)
        logger.info("encoder CUDA graphs by fxsplit_encoder (%s=off: by vLLM): %s", VARIABLE, config)
        return EncoderCudaGraphManager(
            model, config, device=device, dtype=dtype, vllm_config=vllm_config, process_group=group
        )

    def _check_weights(self) -> None:
        if self.manager is not None:
            self.manager.check_weights()

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Whether an action succeeded, on every rank that shares the items. If not, vLLM's own manager serves
        from now on: whatever fails, the engine starts.
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
            self.clear()
        self.manager = None
        warn_once(
            "vLLM's own manager captures the encoder, since fxsplit_encoder could not: "
            f"{type(failure).__name__}: {failure}"
        )
        return False

    # --- what runners call

    @property
    def token_budgets(self) -> list[int]:
        """Output tokens of every budget of any path, increasing."""
        if self.manager is None:
            budgets: list[int] = self.vllm_manager.token_budgets
            return budgets
        return sorted({budget for path in self.manager.limits.path_budgets.values() for budget in path})

    def get_num_graphs_to_capture(self) -> int:
        """Captures that `capture` makes, over all paths and axes."""
        if self.manager is None:
            count: int = self.vllm_manager.get_num_graphs_to_capture()
            return count
        return self.manager.planned_captures().num_graphs

    def supports_modality(self, modality: str) -> bool:
        """Whether captures serve "image" or "video" inputs."""
        return bool((self.manager or self.vllm_manager).supports_modality(modality))

    def is_captured(self) -> bool:
        """Whether `capture` has run since the last `clear`."""
        return bool((self.manager or self.vllm_manager).is_captured())

    def capture(self, graph_pool: Any = None) -> None:
        """Captures every budget; while vLLM measures memory, captures that only take it.

        Args:
            graph_pool: of vLLM's own manager. This library's captures have a pool of their own.
        """
        manager = self.manager
        if manager is None or not self._attempt(lambda: self._capture(manager)):
            self.vllm_manager.capture(graph_pool=graph_pool)

    def _capture(self, manager: EncoderCudaGraphManager) -> None:
        self._forget_rehearsal()
        if _is_profiling():
            self._rehearsal = Rehearsal(manager)
            self._rehearsal.capture()
            return
        if manager.config.compile:
            _note_bounds(manager)
        manager.capture()
        if manager.model_config.modalities and not manager.can_replay():
            raise CaptureError("; ".join(manager.reports) or "no budget could be captured")
        if (num_bytes := _derived_bytes(manager)) > 0:
            logger.info(
                "passes keep %d MiB of weights in another form, in memory that vLLM's measurement of graphs "
                "has no part of",
                num_bytes >> 20,
            )

    def clear(self) -> None:
        """Releases every capture; `capture` may be called again."""
        self._forget_rehearsal()
        (self.manager or self.vllm_manager).clear()

    def execute(self, mm_kwargs: dict[str, Any]) -> list[Tensor] | None:
        """Encodes a batch of images or of videos.

        Returns:
            One tensor an item, (output tokens, hidden); None: vLLM has to encode the batch eagerly.
        """
        if self.manager is None:
            outputs: list[Tensor] | None = self.vllm_manager.execute(mm_kwargs)
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
            stats: dict[str, Any] = self.vllm_manager.get_cumulative_stats()
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

    def __getattr__(self, name: str) -> Any:
        """What no runner of the tested versions reads is that of vLLM's own."""
        if name.startswith("__") or name == "vllm_manager":
            raise AttributeError(name)
        return getattr(self.vllm_manager, name)

    def _forget_rehearsal(self) -> None:
        if self._rehearsal is not None:
            self._rehearsal.clear()
            self._rehearsal = None


def make_adapter(vllm_class: Any, settings: PluginSettings) -> type[VllmEncoderManager]:
    """The class of managers in place of vLLM's."""
    return type(vllm_class.__name__, (VllmEncoderManager,), {"vllm_class": vllm_class, "settings": settings})


def _note_bounds(manager: EncoderCudaGraphManager) -> None:
    """Runs the encoder at two sizes, to learn how long segments are that are the same at any."""
    with noting_bounds(), torch.inference_mode(False), torch.no_grad():
        for path in manager.paths_by_key.values():
            for budget in {path.budgets[0], path.budgets[-1]} if path.budgets else ():
                with contextlib.suppress(InputError):
                    path.forward(path.forward.capture_values(budget))


def _derived_bytes(manager: EncoderCudaGraphManager) -> int:
    """Memory of weights in another form, which is known once passes have run."""
    programs = (path.program for path in manager.paths_by_key.values())
    return sum(program.program.derived.num_bytes for program in programs if program is not None)


def _is_profiling() -> bool:
    """Whether vLLM measures the memory of graphs and throws away what is captured now."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != _PROFILING:
        frame = frame.f_back
    return frame is not None
