"""What `fxsplit::dense_attention` runs: attention over a batch of equally long sequences, by the kernel that
was measured to be the fastest, whether it is made for a batch or for a packed sequence.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from fxsplit_encoder._torch.current_device import on_device
from fxsplit_encoder.attention.choice import current_chooser


def attend_dense(query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, scale: float) -> Tensor:
    """Attention within each entry of a batch.

    Args:
        query_BHTD, key_BHTD, value_BHTD: (batch, heads, tokens, head_dim), all of the same size; what is not
            stored token by token is copied.
        scale: factor of the logits.

    Returns:
        (batch, heads, tokens, head_dim), stored token by token.
    """
    batch, heads, tokens, head_dim = query_BHTD.shape
    q_THD, k_THD, v_THD = (x.transpose(1, 2).flatten(0, 1) for x in (query_BHTD, key_BHTD, value_BHTD))
    lengths = _equal_lengths.of(batch, tokens, query_BHTD.device)
    with on_device(q_THD.device):
        kernel = current_chooser().of(q_THD, lengths, tokens, equal=True)
        out_THD = kernel(q_THD, k_THD, v_THD, lengths, tokens, scale)
    return out_THD.view(batch, tokens, heads, head_dim).transpose(1, 2)


class _EqualLengths:
    """Cumulative lengths 0, tokens, 2 * tokens and so on, for every batch parts of the same tensor.

    Graphs hold their addresses, so what was made once stays: twice the largest, in all.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device], list[Tensor]] = {}
        self._lock = threading.Lock()

    def of(self, batch: int, tokens: int, device: torch.device) -> Tensor:
        """(batch + 1,) int32."""
        made = self._made.get((tokens, device))
        if made is None or made[-1].shape[0] <= batch:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # The memory belongs to that graph, which makes them at every replay.
                return torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
            made = self._grow(batch, tokens, device)
        return made[-1][: batch + 1]

    def _grow(self, batch: int, tokens: int, device: torch.device) -> list[Tensor]:
        with self._lock:
            made = self._made.setdefault((tokens, device), [])
            if not made or made[-1].shape[0] <= batch:
                entries = 1 << batch.bit_length()
                # From the host, which waits: other streams may read it at once.
                made.append((torch.arange(entries + 1, dtype=torch.int32, device="cpu") * tokens).to(device))
        return made


_equal_lengths = _EqualLengths()
