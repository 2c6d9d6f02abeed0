"""Towers of equal blocks, small enough to trace twice; Dynamo finds a traced module's globals by its name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..packed_forwards import WIDTH, attend


class Block(nn.Module):
    """Attention and a linear layer, with a buffer and a keyword argument."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = scale
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor, cu: Tensor, tables: tuple[Tensor, Any] = (), **kwargs: Any) -> Any:
        x = x + attend(x, cu) * self.scale + self.shift
        for table in tables:
            x = x * table
        return F.gelu(self.linear(x))


class ReturnsTuple(Block):
    def forward(self, x: Tensor, cu: Tensor, **kwargs: Any) -> Any:
        return super().forward(x, cu), None


class ReturnsView(Block):
    def forward(self, x: Tensor, cu: Tensor, **kwargs: Any) -> Any:
        return x.view(-1, WIDTH)


class WritesToArgument(Block):
    def forward(self, x: Tensor, cu: Tensor, **kwargs: Any) -> Any:
        out = super().forward(x, cu)
        x.add_(1)
        return out + x


class KeepsState(Block):
    kept: Tensor | None = None

    def forward(self, x: Tensor, cu: Tensor, **kwargs: Any) -> Any:
        self.kept = super().forward(x, cu)
        return self.kept * 2


class MakesConstant(Block):
    def forward(self, x: Tensor, cu: Tensor, **kwargs: Any) -> Any:
        return super().forward(x, cu) * torch.tensor([2.0])


class TakesObject(Block):
    def forward(self, x: Tensor, cu: Tensor, made_by: Any = None, **kwargs: Any) -> Any:
        return super().forward(x, cu) * made_by.factor


class Factor:
    factor = 3.0


class Tower(nn.Module):
    """Blocks of one class, run in order on `x` and the cumulative lengths `cu`."""

    def __init__(self, block: type[Block] = Block, depth: int = 3, **arguments: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.data.normal_(0, 0.5, generator=generator)
        self.requires_grad_(False)
        self.arguments = arguments

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x = inputs["x"] * 1.0
        for block in self.blocks:
            out = block(x, cu=inputs["cu"], **self.arguments)
            x = out[0] if isinstance(out, tuple) else out
        return x


class UnderAutocast(Tower):
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(inputs)


class Dense(nn.Module):
    """Equal tiles, each a sequence of its own, with norms between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.blocks = nn.ModuleList(_DenseBlock() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.5, generator=generator)
        self.requires_grad_(False)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x = inputs["x"]
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x, (x.shape[0], 5)))
        return x


class _DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, sizes: tuple[int, int]) -> Tensor:
        tiles, tokens = sizes
        q, k, v = self.qkv(x).view(tiles, tokens, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(tiles, tokens, WIDTH)
