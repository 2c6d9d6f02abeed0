"""Modes, hooks and settings around a call: gradients, inference mode, and splits of cuBLAS's products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch._C import _len_torch_function_stack as num_function_modes
from torch._C._functorch import maybe_current_level as transform_level
from torch.nn.modules import module as _modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

# Both are written to in place, and never replaced.
_BEFORE, _AFTER = _modules._global_forward_pre_hooks, _modules._global_forward_hooks


def foreign_around() -> str | None:
    """Returns a mode, hooks or a transform that would not see a replay's operations, or None."""
    if _BEFORE or _AFTER:
        return "hooks for all modules"
    if transform_level() is not None:
        return "a transform of torch.func"
    if num_dispatch_modes():
        return "a TorchDispatchMode"
    # `torch.set_default_device` is one too, which changes no more than where tensors are made.
    if num_function_modes():
        modes = _get_current_function_mode_stack()
        if any(type(mode) is not DeviceContext for mode in modes):
            return "a TorchFunctionMode"
    return None


# Entered for every request: torch's own context managers are twelve calls more, and the one below five.
class without_autograd:
    """Without autograd and inference mode, outside of which static buffers made inside are read-only."""

    __slots__ = ("_had_gradients", "_outside")

    def __enter__(self) -> None:
        self._had_gradients = torch.is_grad_enabled()
        self._outside: Any = None
        if torch.is_inference_mode_enabled():
            self._outside = torch._C._InferenceMode(False)
            self._outside.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: object) -> None:
        if self._outside is not None:
            self._outside.__exit__(None, None, None)
            self._outside = None
        torch._C._set_grad_enabled(self._had_gradients)


def in_inference_mode() -> contextlib.AbstractContextManager[None]:
    """Returns the context of `torch.inference_mode()` alone."""
    mode: contextlib.AbstractContextManager[None] = torch._C._InferenceMode(True)
    return mode


_REDUCTIONS = {
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    torch.float16: "allow_fp16_reduced_precision_reduction",
}


@contextlib.contextmanager
def split_k_forbidden(dtype: torch.dtype) -> Iterator[None]:
    """Forbids cuBLASLt, if torch can, to split products of 16 bits; cuBLAS's own raise RuntimeError then."""
    matmul, name = torch.backends.cuda.matmul, _REDUCTIONS.get(dtype)
    if name is None or not hasattr(matmul, f"{name}_split_k"):
        yield
        return
    before = getattr(matmul, name), getattr(matmul, f"{name}_split_k")
    setattr(matmul, name, (False, False))
    try:
        yield
    finally:
        setattr(matmul, name, before)
