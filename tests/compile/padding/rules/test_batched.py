"""Operations on the entries of a batch: what is proved, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from ..checks import BIAS, WIDTH, Forward, assert_proved, assert_refused

KERNEL_1D = torch.linspace(-1, 1, 18).view(3, 2, 3)
KERNEL_TOKENS = torch.linspace(-1, 1, 3 * WIDTH**2).view(WIDTH, WIDTH, 3)

PROVED: dict[str, Forward] = {
    "group norm of every row": lambda y, i: F.group_norm(y, 2, BIAS, BIAS),
    "unfolded patches": lambda y, i: F.unfold(y.view(-1, 2, 2, 2), 2) * 2,
    "features convolved": lambda y, i: F.conv1d(y.view(-1, 2, 4), KERNEL_1D, padding=1),
    "patch convolution": lambda y, i: F.conv2d(y.view(-1, 2, 2, 2), torch.ones(3, 2, 2, 2), stride=2),
    "pooling of features": lambda y, i: F.avg_pool2d(y.view(-1, 2, 2, 2), 2),
    "pooling of features that does not fit": lambda y, i: F.max_pool2d(
        y.view(-1, 1, 2, 4), (1, 3), stride=(1, 2), ceil_mode=True
    ),
    "adaptive pooling of features": lambda y, i: F.adaptive_avg_pool2d(y.view(-1, 1, 2, 4), (1, 3)),
    "features enlarged": lambda y, i: F.interpolate(y.view(-1, 2, 2, 2), scale_factor=2.0, mode="bicubic"),
    "features enlarged to their neighbors": lambda y, i: F.interpolate(y.view(-1, 2, 4), size=6),
    "features reflected": lambda y, i: F.pad(y.view(-1, 2, 2, 2), (1, 1, 1, 1), mode="reflect"),
    "features shuffled": lambda y, i: F.pixel_shuffle(y.view(-1, 4, 1, 2), 2) * 2,
    "features upscaled by a transposed convolution": lambda y, i: F.conv_transpose1d(
        y.view(-1, 2, 4), KERNEL_1D.transpose(0, 1), stride=2
    ),
    "blocks put together": lambda y, i: F.fold(y.view(-1, 4, 2), (2, 4), (2, 2), stride=2),
    "batch norm of every row": lambda y, i: torch.ops.aten._native_batch_norm_legit_no_training(
        y, BIAS, BIAS, BIAS, BIAS.abs(), 0.1, 1e-5
    )[0],
}

REFUSED: dict[str, tuple[Forward, str]] = {
    "unfolding over tokens": (
        lambda y, i: F.unfold(y[None, None], (2, 1)),
        "along the token dimension",
    ),
    "convolution over tokens": (
        lambda y, i: F.conv1d(y.t()[None], KERNEL_TOKENS, padding=1),
        "along the token dimension",
    ),
    "pooling over tokens": (lambda y, i: F.avg_pool2d(y[None, None], (1, 2)), "along the token dimension"),
    "group norm over tokens": (lambda y, i: F.group_norm(y.t()[None], 2), "normalizes over tokens"),
    "batch norm of tokens": (
        lambda y, i: torch.ops.aten._native_batch_norm_legit_no_training(
            y.t(), None, None, y[:, 0] * 0, y[:, 0] * 0 + 1, 0.1, 1e-5
        )[0],
        "depends on the tokens",
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved(name: str) -> None:
    assert_proved(PROVED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str) -> None:
    assert_refused(*REFUSED[name])
