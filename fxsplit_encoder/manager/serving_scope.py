"""Around a request: its turn, whose kernels decide, its device, and no autograd."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import Token
from typing import Any

import torch

from fxsplit_encoder._torch.current_device import ALREADY, on_device
from fxsplit_encoder._torch.grad_mode import without_autograd
from fxsplit_encoder.manager.turns import Turns
from fxsplit_encoder.runtime import Choosers


# Entered for every request: four contexts in one `with` are twice as many calls.
class serving_scope:
    """What `turns`, `kernels.choosing()`, `on_device` and `without_autograd` are, one in the other.

    Args:
        device: of the request's work.
    """

    __slots__ = ("_autograd", "_choosers", "_device", "_elsewhere", "_tokens", "_turns")

    def __init__(self, turns: Turns, kernels: Choosers, device: torch.device) -> None:
        self._turns = turns
        self._choosers = kernels.all
        self._device = device

    def __enter__(self) -> None:
        self._turns.__enter__()
        try:
            self._elsewhere: AbstractContextManager[object] = on_device(self._device)
            if self._elsewhere is not ALREADY:
                self._elsewhere.__enter__()
            tokens: list[Token[Any]] = []
            for chooser in self._choosers:
                tokens.append(chooser.current.set(chooser))
            self._tokens = tokens
            self._autograd = without_autograd()
            self._autograd.__enter__()
        except BaseException as error:
            self._turns.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            self._autograd.__exit__()
            for chooser, token in zip(self._choosers, self._tokens, strict=True):
                chooser.current.reset(token)
            if self._elsewhere is not ALREADY:
                self._elsewhere.__exit__(None, None, None)
        finally:
            self._turns.__exit__(kind, *raised)
