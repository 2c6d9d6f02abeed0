"""What is left to vLLM's own manager, and why."""

from __future__ import annotations

from typing import Any

import torch

from fxsplit_encoder.integrations.vllm.ranks import shares_weights


def reason_to_leave(vllm_config: Any, device: torch.device) -> str | None:
    """Why this library does not serve an engine of this configuration; None: it does."""
    if device.type not in ("cuda", "cpu") or torch.version.hip:
        return f"devices of type {'rocm' if torch.version.hip else device.type} are not supported"
    if shares_weights(vllm_config):
        return (
            "ranks share its weights, and have to capture the same; with --mm-encoder-tp-mode data they "
            "share the images instead"
        )
    lora = vllm_config.lora_config
    if lora is not None and getattr(lora, "enable_tower_connector_lora", False):
        return "its LoRA adapters belong to images by their order, which packing changes"
    return None
