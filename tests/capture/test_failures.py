"""The error of a failed capture: it names the place, and keeps nothing of the frames where memory ran out."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.capture.forward import capture_failure
from fxsplit_encoder.errors import CaptureError, CaptureMemoryError, FxSplitError


class Inner(nn.Module):
    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        held = [x + number for number in range(3)]
        self.seen = [weakref.ref(tensor) for tensor in held]
        raise self.error("no more")


def failure_of(model: nn.Module) -> tuple[FxSplitError, Exception]:
    try:
        model(torch.ones(2))
    except Exception as error:
        return capture_failure(error, "4 rows", "aten::add.Tensor"), error
    raise AssertionError


def test_it_names_the_op_and_the_innermost_module() -> None:
    failure, _ = failure_of(nn.Sequential(nn.Identity(), Inner(RuntimeError)))
    assert isinstance(failure, CaptureError)
    assert str(failure) == ("capturing 4 rows failed at aten::add.Tensor in Inner (1): RuntimeError: no more")


def test_who_keeps_an_error_of_memory_keeps_no_tensor() -> None:
    inner = Inner(torch.OutOfMemoryError)
    failure, cause = failure_of(nn.Sequential(inner))
    assert isinstance(failure, CaptureMemoryError)
    assert cause.__traceback__ is not None
    gc.collect()
    assert [reference() for reference in inner.seen] == [None] * 3
    with pytest.raises(CaptureMemoryError, match="out of memory while capturing 4 rows"):
        raise failure
