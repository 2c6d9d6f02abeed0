"""The ranks of vLLM's tensor parallel group, as far as the encoder is concerned."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def is_data_parallel(vllm_config: Any) -> bool:
    """Whether ranks share the items of a batch, each with a whole encoder."""
    return _num_ranks(vllm_config) > 1 and _mode(vllm_config) == "data"


def shares_weights(vllm_config: Any) -> bool:
    """Whether ranks share the encoder's weights."""
    return _num_ranks(vllm_config) > 1 and _mode(vllm_config) != "data"


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


def _num_ranks(vllm_config: Any) -> int:
    ranks: int = vllm_config.parallel_config.tensor_parallel_size
    return ranks


def _mode(vllm_config: Any) -> str | None:
    multimodal = vllm_config.model_config.multimodal_config
    mode: str | None = None if multimodal is None else multimodal.mm_encoder_tp_mode
    return mode
