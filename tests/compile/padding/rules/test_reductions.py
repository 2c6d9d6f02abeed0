"""Products, reductions, normalizations, convolution and pooling: what is proved, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from fxsplit_encoder.compile import BoundProgram

from ..checks import BIAS, WEIGHT, WIDTH, Forward, assert_proved, assert_refused, trace_each

KERNEL_1D = torch.linspace(-1, 1, 18).view(3, 2, 3)
KERNEL_TOKENS = torch.linspace(-1, 1, 3 * WIDTH**2).view(WIDTH, WIDTH, 3)

PROVED: dict[str, Forward] = {
    "linear": lambda y, i: F.linear(y, WEIGHT, BIAS),
    "linear of three dimensions": lambda y, i: F.linear(y.view(-1, 1, WIDTH), WEIGHT),
    "linear with its gelu": lambda y, i: torch.ops.fxsplit.addmm_gelu(BIAS, y, WEIGHT),
    "linear by a measured kernel": lambda y, i: (
        torch.ops.fxsplit.linear(y, WEIGHT, BIAS, "gelu")
        + torch.ops.fxsplit.linear(y, WEIGHT, None, "gelu_tanh")
    ),
    "linear in fixed blocks": lambda y, i: torch.ops.fxsplit.fixed_linear(y, WEIGHT.t(), BIAS, "gelu_tanh"),
    "bmm with the tokens as batch": lambda y, i: y.view(-1, 2, 4) @ i["x"].view(-1, 4, 2),
    "bmm with shared matrices": lambda y, i: torch.bmm(y.view(-1, 2, 4).transpose(0, 1), torch.ones(2, 4, 4)),
    "layer norm over features": lambda y, i: F.layer_norm(y, (WIDTH,), BIAS, BIAS),
    "rms norm over features": lambda y, i: F.rms_norm(y, (WIDTH,), BIAS),
    "softmax over features": lambda y, i: y.softmax(-1),
    "log softmax over features": lambda y, i: y.log_softmax(1),
    "cumsum over features": lambda y, i: y.cumsum(1),
    "cumsum over tokens": lambda y, i: y.cumsum(0),
    "cumulated exponentials of tokens": lambda y, i: y.logcumsumexp(0),
    "mean over features": lambda y, i: y - y.mean(1, keepdim=True),
    "sum that drops a dimension": lambda y, i: y.view(-1, 2, 4).sum(1),
    "variance over features": lambda y, i: torch.var_mean(y, 1)[0],
    "vector norm over features": lambda y, i: F.normalize(y, dim=-1),
    "vector norm of order 1 over features": lambda y, i: torch.linalg.vector_norm(y, 1, dim=1),
    "argmax over features": lambda y, i: y.argmax(1),
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
    "tokens as the weight of a measured product": (
        lambda y, i: torch.ops.fxsplit.linear(WEIGHT, y, None, "gelu"),
        "depends on the tokens",
    ),
    "tokens as the weight before a gelu": (
        lambda y, i: torch.ops.fxsplit.addmm_gelu(y[:, 0], WEIGHT, y.t()),
        "depends on the tokens",
    ),
    "tokens as the weight of fixed blocks": (
        lambda y, i: torch.ops.fxsplit.fixed_linear(WEIGHT, y.t(), None, ""),
        "depends on the tokens",
    ),
    "gram matrix": (lambda y, i: y @ y.t(), "depends on the tokens"),
    "covariance": (lambda y, i: y.t() @ y, "depends on the tokens"),
    "shared times rows": (lambda y, i: WEIGHT @ y.t(), "depends on the tokens"),
    "bias of rows": (lambda y, i: torch.addmm(i["x"], y, WEIGHT), "depends on the tokens"),
    "bmm over tokens": (
        lambda y, i: y.view(-1, 2, 4).permute(1, 0, 2) @ y.view(-1, 2, 4).permute(1, 2, 0),
        "along the token dimension",
    ),
    "bmm that contracts tokens": (
        lambda y, i: torch.bmm(y.t()[None], y[None]),
        "along the token dimension",
    ),
    "layer norm over tokens": (
        lambda y, i: F.layer_norm(y.t().softmax(0).view(1, -1), (y.shape[0] * 8,)),
        "computes with the token count",
    ),
    "softmax over tokens": (lambda y, i: y.softmax(0), "along the token dimension"),
    "softmax over tokens, transposed": (lambda y, i: y.t().softmax(-1), "along the token dimension"),
    "mean over tokens": (lambda y, i: y - y.mean(0), "reduces over tokens"),
    "sum of everything": (lambda y, i: y / y.sum(), "reduces over tokens"),
    "maximum over tokens": (lambda y, i: y.amax(0, keepdim=True) + y, "reduces over tokens"),
    "variance over tokens": (lambda y, i: torch.var_mean(y, 0)[0] + y, "reduces over tokens"),
    "vector norm of order 1 over tokens": (
        lambda y, i: y / torch.linalg.vector_norm(y, 1, dim=0),
        "reduces over tokens",
    ),
    "normalize over tokens": (lambda y, i: F.normalize(y, dim=0), "reduces over tokens"),
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


@pytest.fixture(scope="module")
def programs() -> dict[str, BoundProgram]:
    return trace_each({**PROVED, **{name: forward for name, (forward, _) in REFUSED.items()}})


@pytest.mark.parametrize("name", PROVED)
def test_independent_rows_are_proved(name: str, programs: dict[str, BoundProgram]) -> None:
    assert_proved(programs[name])


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str, programs: dict[str, BoundProgram]) -> None:
    assert_refused(programs[name], REFUSED[name][1])
