"""Around whatever a manager runs: no gradients, and no inference tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def without_autograd() -> AbstractContextManager[None]:
    """Outside of autograd and of inference mode."""
    return _OutsideInferenceMode() if torch.is_inference_mode_enabled() else torch.no_grad()


# Entered for every request of vLLM's: a class takes less time than a generator.
class _OutsideInferenceMode(AbstractContextManager[None]):
    """Without autograd, and outside of inference mode: static buffers are ordinary tensors, which could not
    be written outside of it if they were made inside.
    """

    __slots__ = ("_inference_mode", "_no_grad")

    def __enter__(self) -> None:
        self._inference_mode = torch.inference_mode(False)
        self._no_grad = torch.no_grad()
        self._inference_mode.__enter__()
        self._no_grad.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._no_grad.__exit__(None, None, None)
        self._inference_mode.__exit__(None, None, None)
