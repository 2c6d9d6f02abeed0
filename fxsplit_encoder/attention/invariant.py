"""The one kernel that attends everywhere where `invariant` is set, chosen by what it is, never by time.

What a segment gets from such a kernel depends on that segment alone: not on where it lies, on what else the
call holds, on bounds, or on whether the host knows its length. That rules out kernels that choose tiles by
the longest segment, or that split the keys among blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxsplit_encoder.attention.kernels import AttentionKernel, AttentionShape
from fxsplit_encoder.errors import ConfigError

# The fastest of them at long segments, by the measurements of docs/attention.md; then as they are listed.
_PREFERRED = frozenset(("flash_attn_4",))


def invariant_kernel(
    kernels: Sequence[AttentionKernel], shape: AttentionShape, pinned: str | None = None
) -> AttentionKernel:
    """The best kernel that attends to heads of this kind by one algorithm, whatever the segments.

    Args:
        kernels: all that there are.
        shape: of which the device, the dtype and the heads count, so that all calls of a tower get the same.
        pinned: the name of the only one that will do; None: any.

    Raises:
        ConfigError: there is none, and why.
    """
    reasons = []
    for kernel in _in_order(kernels):
        if pinned not in (None, kernel.name):
            continue
        reason = _why_not(kernel, shape)
        if reason is None:
            return kernel
        if kernel.is_invariant or pinned is not None:
            reasons.append(f"{kernel.name}: {reason}")
    heads = f"{shape.heads} heads of {shape.head_dim} in {str(shape.dtype).removeprefix('torch.')}"
    raise ConfigError(
        f"invariant: no kernel attends to {heads} on {shape.device} by one algorithm for all segments "
        f"({'; '.join(reasons)}); allowed: on CUDA a tower in bfloat16 or float16, with attention: auto"
    )


def invariant_names(kernels: Sequence[AttentionKernel], device: torch.device) -> list[str]:
    """The kernels that `invariant` may choose on a device, in order of preference."""
    working = (k for k in _in_order(kernels) if k.is_invariant and k.unavailable_reason(device) is None)
    return [kernel.name for kernel in working if kernel.is_invariant_on(device)]


def _in_order(kernels: Sequence[AttentionKernel]) -> list[AttentionKernel]:
    """The kernels in order of preference: elsewhere what comes first is what others have to beat."""
    return sorted(kernels, key=lambda kernel: kernel.name not in _PREFERRED)


def _why_not(kernel: AttentionKernel, shape: AttentionShape) -> str | None:
    if not kernel.is_invariant:
        return "its algorithm may depend on the segments"
    if (reason := kernel.unavailable_reason(shape.device)) is not None:
        return reason
    if not kernel.is_invariant_on(shape.device):
        return "on this device its algorithm depends on the longest segment"
    if shape.device.type == "cuda" and not kernel.capturable:
        return "no CUDA graph can hold it"
    return None if kernel.supports(shape) else "it does not compute such heads"
