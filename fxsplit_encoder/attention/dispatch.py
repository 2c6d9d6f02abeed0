"""What `fxsplit::varlen_attention` runs: the kernel that the current chooser names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch import Tensor

from fxsplit_encoder.attention.choice import KernelChooser

_of_process = KernelChooser()
_current: ContextVar[KernelChooser] = ContextVar("fxsplit_encoder_kernel_chooser")


def current_chooser() -> KernelChooser:
    """The chooser of the enclosing `choosing`, or the process's own, which pins nothing."""
    return _current.get(_of_process)


@contextlib.contextmanager
def choosing(chooser: KernelChooser) -> Iterator[None]:
    """Inside, this chooser decides: for captures as for what runs eagerly between and beside them."""
    token = _current.set(chooser)
    try:
        yield
    finally:
        _current.reset(token)


def attend(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    """Attention within each segment of a packed sequence.

    Args:
        query_THD, key_THD, value_THD: (tokens, heads, head_dim); any strides whose last is 1.
        cu_seqlens: (segments + 1,) int32 on the same device, rising from 0; segments may be empty.
        max_seqlen: an upper bound of the longest segment, in tokens.
        scale: factor of the logits.

    Returns:
        (tokens, heads, head_dim), contiguous. Rows outside every segment are undefined.
    """
    kernel = _current.get(_of_process).of(query_THD, cu_seqlens, max_seqlen)
    return kernel(query_THD, key_THD, value_THD, cu_seqlens, max_seqlen, scale)


def attend_out(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    out_THD: Tensor,
) -> Tensor:
    """`attend` into `out_THD`, which has at least `tokens` rows and keeps the later ones. Returns it."""
    kernel = _current.get(_of_process).of(query_THD, cu_seqlens, max_seqlen)
    return kernel(query_THD, key_THD, value_THD, cu_seqlens, max_seqlen, scale, out_THD)
