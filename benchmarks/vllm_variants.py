"""vLLM's own tower as a variant: its eager forward, and its manager of captures.

It has random weights of its own, so its manager is compared with its own eager forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from models import Batch, rows_of
from torch import Tensor
from variants import VARIANTS, Variant
from vllm_classes import (
    CLASSES,
    build,
    captured_manager,
    engine_config,
    prepare_environment,
    start_vllm,
    vllm_inputs,
    vllm_or_none,
)
from workloads import Workload


class VllmEager(Variant):
    name = "vllm-eager"
    needs_cuda = True

    @classmethod
    def unavailable(cls, tower: str, device: str) -> str | None:
        if tower not in CLASSES:
            return f"vLLM's classes here are those of {', '.join(CLASSES)}"
        missing = None if vllm_or_none() else "vLLM is not installed"
        return super().unavailable(tower, device) or missing

    def why_not(self, workload: Workload) -> str | None:
        return "videos are left out" if any(request.clips for request in workload) else None

    def start(self) -> None:
        prepare_environment()
        start_vllm(self.model.device)
        described = CLASSES[self.model.name]
        self._config = engine_config(described, self.model.dtype)
        self._tower = build(described, self._config, self.model.device)

    def reference(self, batch: Batch) -> Tensor:
        return rows_of(self._eager(self._inputs(batch)))

    def run(self, batch: Batch) -> Any:
        return self._eager(self._inputs(batch))

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        return vllm_inputs(self.model.kind, batch.mm_kwargs)

    @torch.inference_mode()
    def _eager(self, inputs: dict[str, Any]) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = self._tower.embed_multimodal(**inputs)
        return outputs


class VllmManager(VllmEager):
    name = "vllm"

    def start(self) -> None:
        super().start()
        from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

        device, dtype = self.model.device, self.model.dtype
        self._manager: Any = captured_manager(
            EncoderCudaGraphManager, self._config, device, dtype, self._tower
        )

    @torch.inference_mode()
    def run(self, batch: Batch) -> Any:
        return self._manager.execute(self._inputs(batch))


CONTENDERS: Mapping[str, type[Variant]] = {
    **VARIANTS,
    VllmEager.name: VllmEager,
    VllmManager.name: VllmManager,
}
"""All that are compared, by name, in the order in which they run."""
