"""Modes around what a manager runs: no gradients, and no inference tensors, or these alone."""

from __future__ import annotations

from typing import Any

import torch


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


class in_inference_mode:
    """`torch.inference_mode()`."""

    __slots__ = ("_inside",)

    def __enter__(self) -> None:
        inside: Any = torch._C._InferenceMode(True)
        inside.__enter__()
        self._inside = inside

    def __exit__(self, *raised: object) -> None:
        self._inside.__exit__(None, None, None)
