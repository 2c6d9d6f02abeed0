"""Attention over a grid with a bias for the key's row and one for its column, by several ways.

    python benchmarks/biased_attention.py --output benchmarks/results/biased_attention_h200.json

The attention of SAM's blocks in DeepSeek-OCR: 12 heads of 64, bf16, over the 64 x 64 patches of a page of
1024 pixels, the 40 x 40 of four crops of 640, and their windows of 14 x 14. Given are queries, keys, values
and the terms of the bias; milliseconds of the device for all that follows, compiled by torch.compile for the
size, in a CUDA graph:

* "bias": the terms added up, and `scaled_dot_product_attention` with the sum as its mask, as the model does.
* "features": the terms as features of wider heads, with values as wide, by the kernel that torch chooses.
* "features, cuDNN": the same by cuDNN, whose values may be narrower than keys: the pass `decomposed_bias`.
* "flex_attention": torch's, with the terms looked up for every score.

"error" is the relative root mean square of the difference from float64. `--small` takes small grids, on a CPU
too, where nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from environment import describe
from storage import make_parser, one_line, store
from tables.biased_attention import table
from timing import captured_ms, wall_ms
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from fxsplit_encoder.compile.passes import relative_rms

HEADS, HEAD_DIM = 12, 64


@dataclass(frozen=True)
class Grid:
    """So many grids of one size, side by side."""

    count: int
    side: int


GRIDS = {
    "page, 64 x 64": Grid(1, 64),
    "4 crops, 40 x 40": Grid(4, 40),
    "25 windows, 14 x 14": Grid(25, 14),
    "36 windows, 14 x 14": Grid(36, 14),
}
SMALL_GRIDS = {"4 x 4": Grid(2, 4)}

Way = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""From queries, keys, values (grids, heads, positions, width) and terms (grids, heads, positions, side)."""


def bias(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    mask = (rows[..., :, None] + columns[..., None, :]).flatten(-2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def features(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    wide_q, wide_k = _widened(q, k, rows, columns)
    wide_v = F.pad(v, (0, wide_k.shape[-1] - v.shape[-1]))
    attended = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, scale=HEAD_DIM**-0.5)
    return attended[..., : v.shape[-1]]


def features_cudnn(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    wide_q, wide_k = _widened(q, k, rows, columns)
    result: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        wide_q, wide_k, v, None, False, scale=HEAD_DIM**-0.5
    )[0]
    return result


def flex(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    side = rows.shape[-1]

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + rows[b, h, i, j // side] + columns[b, h, i, j % side]

    result: Tensor = flex_attention(q, k, v, score_mod=biased)
    return result


WAYS: Mapping[str, Way] = {
    "bias": bias,
    "features": features,
    "features, cuDNN": features_cudnn,
    "flex_attention": flex,
}


def _widened(q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Queries with the terms among their features, keys with a one at their row and their column."""
    side, width = rows.shape[-1], q.shape[-1] + 2 * rows.shape[-1]
    missing = -width % 8
    position = torch.arange(side * side, device=q.device)[:, None]
    choices = torch.arange(side + missing, device=q.device)
    ones = torch.cat((position // side == choices[:side], position % side == choices), 1).to(k.dtype)
    terms = torch.cat((rows, columns), -1) * HEAD_DIM**0.5
    wide_q = F.pad(torch.cat((q, terms), -1), (0, missing))
    return wide_q, torch.cat((k, ones.expand(*k.shape[:-1], -1)), -1)


@torch.no_grad()
def measure(name: str, grid: Grid, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for every way."""
    torch.manual_seed(0)
    positions = grid.side**2
    shapes = [(grid.count, HEADS, positions, width) for width in (HEAD_DIM,) * 3 + (grid.side,) * 2]
    exact = [torch.randn(shape, device=device, dtype=torch.float64) for shape in shapes]
    values = [tensor.bfloat16() for tensor in exact]
    expected = bias(*(value.double() for value in values))
    for way, attend in WAYS.items():
        row: dict[str, Any] = {"grid": name, "way": way}
        torch._dynamo.reset()
        call = torch.compile(attend, dynamic=False) if device.type == "cuda" else attend
        try:
            row["error"] = relative_rms(call(*values), expected)
            clock = captured_ms if device.type == "cuda" else wall_ms
            row["ms"] = clock(lambda call=call: call(*values))  # type: ignore[misc]
        except Exception as error:  # one that cannot run here is told, and the others go on
            row["failed"] = one_line(error)
        yield row


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--small", action="store_true", help="small grids, on a CPU too")
    arguments = parser.parse_args()
    if not (arguments.small or torch.cuda.is_available()):
        parser.exit(2, "biased_attention.py needs a CUDA device, or --small\n")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    result = {**describe(), "rows": rows}
    for name, grid in (SMALL_GRIDS if arguments.small else GRIDS).items():
        for row in measure(name, grid, device):
            rows.append(row)
            store(arguments.output, result)
    print(table(rows, "simple"))


if __name__ == "__main__":
    main()
