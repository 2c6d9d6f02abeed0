"""vLLM's build of FlashAttention: generation 3 on Hopper, 2 elsewhere."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.kernels import capability, find
from fxsplit_encoder.kernels.attention.attention_kernel import HalfPrecisionKernel, Target

_ALIAS = "fxsplit_encoder_vllm_flash_attn"


class VllmFlashAttention(HalfPrecisionKernel):
    """`vllm.vllm_flash_attn`, without importing the rest of vLLM, which changes settings of torch."""

    name = "vllm_flash_attn"
    architectures = (8, 9)

    def package_problem(self, device: torch.device) -> str | None:
        """Whether vLLM is installed with the extension that this device needs."""
        return _function(_version(device))[1]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, into: Target
    ) -> Tensor:
        version = _version(q.device)
        result: Tensor = _function(version)[0](
            q,
            k,
            v,
            max_seqlen_q=max_seqlen,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_k=max_seqlen,
            cu_seqlens_k=cu_seqlens,
            softmax_scale=scale,
            out=into,
            fa_version=version,
        )
        return result if into is None else into


def _version(device: torch.device) -> int:
    return 3 if capability(device)[0] == 9 else 2


@functools.cache
def _function(version: int) -> tuple[Any, str | None]:
    """vLLM's function, or why this version of it is not there."""
    package = "vllm.vllm_flash_attn" if "vllm" in sys.modules else _alias()
    if package is None:
        return None, "vllm is not installed"
    interface = f"{package}.flash_attn_interface"
    function, problem = find(interface, "flash_attn_varlen_func")
    if problem is None and not find(interface, f"FA{version}_AVAILABLE")[0]:
        problem = (
            f"vllm has no FlashAttention {version}: {find(interface, f'FA{version}_UNAVAILABLE_REASON')[0]}"
        )
    return function, problem


def _alias() -> str | None:
    """vLLM's directory as a package of another name, so that `vllm` itself is not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = types.ModuleType(_ALIAS)
    package.__path__ = [str(Path(spec.submodule_search_locations[0]) / "vllm_flash_attn")]
    sys.modules[_ALIAS] = package
    return _ALIAS
