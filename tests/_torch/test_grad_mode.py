"""Outside of autograd and of inference mode, and back in what there was before."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import pytest
import torch

from fxsplit_encoder._torch.modes import in_inference_mode, without_autograd


def modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "around", [contextlib.nullcontext(), torch.no_grad(), torch.inference_mode(), torch.enable_grad()]
)
def test_inside_there_is_neither_and_outside_what_there_was(
    around: AbstractContextManager[object], fails: bool
) -> None:
    with around:
        before = modes()
        for _ in range(2):
            with contextlib.suppress(KeyError), without_autograd():
                assert modes() == (False, False)
                with without_autograd():
                    assert not torch.ones(1).is_inference()
                assert modes() == (False, False)
                if fails:
                    raise KeyError
            assert modes() == before
    assert modes() == (True, False)


def test_inference_mode_is_torchs() -> None:
    with without_autograd():
        with contextlib.suppress(KeyError), in_inference_mode():
            assert modes() == (False, True)
            assert torch.ones(1).is_inference()
            raise KeyError
        assert modes() == (False, False)
    assert modes() == (True, False)
