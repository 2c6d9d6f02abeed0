"""vLLM's own model classes at a tiny size, on a CPU and with random weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm_classes import join_group, write_model
from vllm_cpu import use_padded_attention

MAX_LEN = 2048

_captures = False


@contextlib.contextmanager
def as_a_gpu_captures() -> Iterator[None]:
    """Models that leave something out while a GPU captures do so inside."""
    global _captures
    _captures = True
    try:
        yield
    finally:
        _captures = False


_kept: list[torch.library.Library] = []


def _declare_missing() -> None:
    """Layers hold this op of the compiled library even where they do not call it, as on a CPU."""
    if not hasattr(torch.ops._C, "gelu_quick"):
        library = torch.library.Library("_C", "FRAGMENT")
        library.define("gelu_quick(Tensor! out, Tensor input) -> ()")
        _kept.append(library)


@functools.cache
def start_vllm(rank: int = 0, ranks: int = 1, rendezvous: str = "") -> None:
    """What a worker does before it builds a model; the ranks share it by tensor parallelism."""
    use_padded_attention()
    _declare_missing()
    # What models ask of a GPU.
    torch.cuda.is_current_stream_capturing = lambda: _captures
    torch.accelerator.get_memory_info = lambda device=None: (2**30, 2**30)
    join_group("gloo", rank, ranks, rendezvous)


def engine_config(config: dict[str, Any], processor: dict[str, Any] | None = None, **options: Any) -> Any:
    """vLLM's configuration for a model of this config.json, whose image processor `processor` describes."""
    from vllm.engine.arg_utils import EngineArgs

    settings = dict(
        model=write_model(config, processor),
        mm_device_do_normalize=processor is not None,
        skip_tokenizer_init=True,
        dtype="float32",
        load_format="dummy",
        mm_encoder_only=True,
        trust_remote_code=True,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_LEN,
    )
    return EngineArgs(**{**settings, **options}).create_engine_config()


def build(vllm_config: Any) -> Any:
    """The model's encoder, with random weights that are no whole numbers and no zeros."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    if not torch.distributed.is_initialized():
        start_vllm()
    with set_current_vllm_config(vllm_config):
        model = initialize_model(vllm_config)
    randomize(model)
    prepare(model, vllm_config)
    return model.eval()


def randomize(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.1, generator=generator)


def prepare(model: Any, vllm_config: Any) -> None:
    """What vLLM's loader does last. Linear layers are torch's, which may be compiled."""
    from vllm import _custom_ops
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    _custom_ops._supports_onednn = False
    with set_current_vllm_config(vllm_config):
        process_weights_after_loading(model, vllm_config.model_config, torch.device("cpu"))
