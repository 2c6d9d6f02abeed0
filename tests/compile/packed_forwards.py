"""Small forwards around one packed attention, traced as the library traces a tower."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fxsplit_encoder.kernels.attention  # noqa: F401  (registers the op)
from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.compile.program import BoundProgram
from fxsplit_encoder.compile.trace import trace_forward

WIDTH = 8
SPLITTING_OPS = ("fxsplit::varlen_attention", "aten::scaled_dot_product_attention")
EAGER = CompileOptions(SPLITTING_OPS, "eager")


def attend(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(tokens, WIDTH) through one packed attention of two heads."""
    q = x.view(-1, 2, WIDTH // 2)
    return torch.ops.fxsplit.varlen_attention(q, q, q, cu_seqlens, q.shape[0], 0.5).view(-1, WIDTH)


def packed_inputs(tokens: int) -> dict[str, Tensor]:
    """Rows, one integer a row, and the cumulative lengths of two segments."""
    generator = torch.Generator().manual_seed(tokens)
    return {
        "x": torch.randn(tokens, WIDTH, generator=generator),
        "index": torch.randint(0, 4, (tokens,), generator=generator),
        "cu": torch.tensor([0, tokens // 3, tokens], dtype=torch.int32),
    }


def trace_packed(
    after: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
    piece_compiler: Any = "eager",
    tokens: int = 12,
    options: CompileOptions | None = None,
) -> BoundProgram:
    """Traces `after(attention(x), inputs)`."""

    def forward(inputs: Mapping[str, Tensor]) -> Tensor:
        return after(attend(inputs["x"], inputs["cu"]), inputs)

    return trace_with(
        forward, packed_inputs(tokens), options or CompileOptions(SPLITTING_OPS, piece_compiler)
    )


def trace_with(
    forward: Callable[[Mapping[str, Tensor]], Tensor],
    inputs: dict[str, Tensor],
    options: CompileOptions = EAGER,
    module: nn.Module | None = None,
) -> BoundProgram:
    """Traces a forward for any size of the first dimension of each input."""
    return trace_forward(forward, inputs, {name: [0] for name in inputs}, options, module)
