"""A kernel that is compiled when it is first called, inside of a capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxsplit_encoder.capture.breakable import BreakableCUDAGraphCapture
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.capture.wrapper import BreakableCUDAGraphWrapper
from fxsplit_encoder.errors import CaptureError

from ..capture import breakable_checks
from .lazy_kernel import add_number, forget_compiled

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    forget_compiled()


def test_sglang_19490_a_capture_that_was_not_warmed_up_holds_the_kernel_or_leaves_nothing() -> None:
    x = torch.ones(256, device="cuda")
    pool = GraphPool(x.device)
    capture = BreakableCUDAGraphCapture(pool)
    try:
        with capture:
            y = add_number(x * 2, 3)
    except (CaptureError, RuntimeError):
        breakable_checks.assert_nothing_is_left(capture, pool, x)
    else:
        x.fill_(5)
        capture.replay()
        assert y.tolist() == [13.0] * 256


def test_sglang_24834_sglang_24847_sglang_25121_a_module_is_warmed_up_before_it_is_captured() -> None:
    class Lazy(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return add_number(x, 4) * 2

    wrapper = BreakableCUDAGraphWrapper(Lazy().eval())
    with torch.no_grad():
        for value in (1.0, 2.0):
            assert wrapper(torch.full((256,), value, device="cuda")).tolist() == [2 * (value + 4)] * 256
    assert (wrapper.hits, wrapper.misses) == (2, {})
