"""Random programs: whatever is proved gives the same when it is padded."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.errors import CompileError

from ..packed_forwards import WIDTH, packed_inputs, trace_packed
from .checks import assert_real_rows_unchanged

_dims = st.integers(0, 3)
_UNARY: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "transpose": lambda x, a, b: x.transpose(a, b),
    "unsqueeze": lambda x, a, b: x.unsqueeze(a),
    "squeeze": lambda x, a, b: x.squeeze(a),
    "flatten": lambda x, a, b: x.flatten(a, a + 1),
    "halve": lambda x, a, b: x.unflatten(a, (-1, 2)),
    "double": lambda x, a, b: x.unflatten(a, (2, -1)),
    "merge": lambda x, a, b: x.reshape(-1, 4 * x.shape[-1]),
    "reshape": lambda x, a, b: x.reshape(-1, 4),
    "expand": lambda x, a, b: x.unsqueeze(a).expand(*x.shape[:a], 3, *x.shape[a:]),
    "contiguous": lambda x, a, b: x.contiguous(),
    "softmax": lambda x, a, b: x.softmax(a),
    "cumsum": lambda x, a, b: x.cumsum(a),
    "sum": lambda x, a, b: x.sum(a, keepdim=b > 1),
    "mean of two": lambda x, a, b: x.mean((a, b)),
    "amax": lambda x, a, b: x.amax(a, keepdim=b > 1),
    "var": lambda x, a, b: x.var(a, keepdim=b > 1),
    "norm": lambda x, a, b: torch.linalg.vector_norm(x, b, dim=a, keepdim=True),
    "layer norm": lambda x, a, b: F.layer_norm(x, x.shape[a:]),
    "argmax": lambda x, a, b: x.argmax(a).float(),
    "flip": lambda x, a, b: x.flip(a),
    "roll": lambda x, a, b: x.roll(1, a),
    "first": lambda x, a, b: x.select(a, 0),
    "last": lambda x, a, b: x.select(a, -1),
    "without first": lambda x, a, b: x.narrow(a, 1, x.shape[a] - 1),
    "cut": lambda x, a, b: torch.cat((x.select(a, 0).unsqueeze(a), x), a),
    "doubled": lambda x, a, b: torch.cat((x, x.tanh()), a),
    "stacked": lambda x, a, b: torch.stack((x, x.tanh()), a),
    "half": lambda x, a, b: x.chunk(2, a)[b % 2],
    "pad": lambda x, a, b: F.pad(x, [0, 0] * a + [b, 1]),
    "gelu": lambda x, a, b: F.gelu(x),
    "repeat": lambda x, a, b: x.repeat([2 if d == a else 1 for d in range(x.dim())]),
    "shared repeat": lambda x, a, b: x + torch.ones(x.shape[b]).repeat(x.shape[a], 1),
    "class token": lambda x, a, b: torch.cat(
        (torch.ones(x.shape[-1]).expand(*x.shape[:a], 1, *x.shape[a + 1 : -1], x.shape[-1]), x), a
    ),
    "sort": lambda x, a, b: x.sort(a)[0],
    "tril": lambda x, a, b: x.tril(),
    "gram": lambda x, a, b: x @ x.transpose(-1, -2),
    "cross": lambda x, a, b: x.transpose(-1, -2) @ x,
    "scale by size": lambda x, a, b: x * x.shape[a],
    "divide by size": lambda x, a, b: x / x.shape[a],
    "add positions": lambda x, a, b: x + torch.arange(x.shape[a]),
    "add inner positions": lambda x, a, b: x + torch.arange(x.shape[a])[:, None],
    "where positions": lambda x, a, b: torch.where(torch.arange(x.shape[a]) > b, x, 0.0),
    "outer": lambda x, a, b: x.unsqueeze(-1) * x.unsqueeze(-2),
    "shared product": lambda x, a, b: x @ torch.ones(x.shape[-1], 4),
    "shared product on the left": lambda x, a, b: torch.ones(4, x.shape[-2]) @ x,
    "group norm": lambda x, a, b: F.group_norm(x, 1),
    "convolution": lambda x, a, b: F.conv1d(x, torch.ones(2, x.shape[1], 3), padding=1),
    "pooling": lambda x, a, b: F.avg_pool2d(x, 2),
    "upsampling": lambda x, a, b: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "spread": lambda x, a, b: x + torch.zeros(x.shape[a], x.shape[b]),
    "dense attention": lambda x, a, b: F.scaled_dot_product_attention(x, x, x),
    "truncated": lambda x, a, b: x[..., : x.shape[a] // 2],
    "mask": lambda x, a, b: x.masked_fill(x.select(a, 0).unsqueeze(a) > 0, 1.0),
    "new full": lambda x, a, b: x + x.new_full((x.shape[a],), 2.0),
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "add of last": lambda x, y: x + y.transpose(0, -1),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "matmul": lambda x, y: x @ y,
    "matmul transposed": lambda x, y: x @ y.transpose(-1, -2),
    "lookup": lambda x, y: y[x.argmax(-1)],
    "cat": lambda x, y: torch.cat((x, y), -1),
    "cat first": lambda x, y: torch.cat((x, y), 0),
    "maximum": lambda x, y: torch.maximum(x, y.unsqueeze(1)),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
}
# Where the token dimension is when a random program starts.
_LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda y: y,
    lambda y: y.t(),
    lambda y: y.view(-1, 2, 4),
    lambda y: y.view(-1, 2, 4).transpose(0, 1),
    lambda y: y.view(-1, 2, 4).permute(1, 2, 0),
    lambda y: y.unsqueeze(0),
    lambda y: y.view(-1, 4 * WIDTH),
]
Step = tuple[str, int, int]
_MOVES = ("transpose", "unsqueeze", "squeeze", "flatten", "halve", "double", "reshape", "expand")
_ALONG = ("softmax", "cumsum", "sum", "mean of two", "amax", "var", "norm", "argmax", "layer norm")
_OTHERS = sorted({*_UNARY, *_BINARY} - {*_MOVES, *_ALONG})
_steps = st.tuples(st.one_of(*map(st.sampled_from, (_MOVES, _ALONG, _OTHERS))), _dims, _dims)


def _interpret(layout: int, steps: list[Step], y: Tensor, x: Tensor) -> list[Tensor]:
    values = [_LAYOUTS[layout](x), _LAYOUTS[layout](y)]
    for name, a, b in steps:
        if name in _UNARY:
            values.append(_UNARY[name](values[-1], a, b))
        else:
            values.append(_BINARY[name](values[-1], values[a % len(values)]))
    return values


def _runnable(layout: int, steps: list[Step]) -> list[Step]:
    """The steps without those that fail in eager at one of two sizes, or make a tensor too large."""
    kept: list[Step] = []
    for step in steps:
        try:
            for tokens in (8, 12, 20):
                last = _interpret(
                    layout, [*kept, step], torch.randn(tokens, WIDTH), torch.randn(tokens, WIDTH)
                )[-1]
                if last.numel() > 20_000 or last.numel() == 0 or last.dim() == 0:
                    raise RuntimeError("size")
        except (RuntimeError, IndexError, ValueError):
            continue
        kept.append(step)
    return kept


@pytest.mark.exhaustive
@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
@given(st.integers(0, len(_LAYOUTS) - 1), st.lists(_steps, min_size=2, max_size=6))
def test_whatever_is_proved_may_be_padded(layout: int, steps: list[Step]) -> None:
    steps = _runnable(layout, steps)[:4]
    try:
        bound = trace_packed(lambda y, i: _interpret(layout, steps, y, i["x"])[-1] * 1)
    except CompileError:
        event("specialized")
        return
    if not bound.program.padding.proved:
        event("refused")
        return
    event("proved")
    for poison in (float("nan"), 0.0, 50.0):
        assert_real_rows_unchanged(bound, packed_inputs(8), 20, poison)
