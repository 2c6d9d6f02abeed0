from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from .packed_tower_tests import PackedModuleTests, Towers
from .tiny_packed import glm4v


def by_frame(grid: Tensor) -> Tensor:
    """The tower takes a video as images, one a frame: so the model around it gives it."""
    return torch.tensor([[1, h, w] for t, h, w in grid.tolist() for _ in range(t)])


class TestGlm4v(PackedModuleTests):
    metadata: ClassVar[list[str]] = ["position_ids", "interp_indices", "interp_weights", "cu_seqlens"]

    @classmethod
    def make_tower(cls) -> nn.Module:
        return glm4v(blocks=3)

    @classmethod
    def run_reference(cls, tower: Any, pixels: Tensor, grid: Tensor) -> Any:
        return tower(pixels, by_frame(grid))

    @pytest.mark.parametrize(
        "grid", [(1, 2, 2), (1, 6, 6), (1, 2, 40), (1, 24, 18), (1, 60, 44), (2, 8, 6)], ids=str
    )
    @torch.no_grad()
    def test_positions_are_those_that_the_tower_samples(self, grid: Any, towers: Towers) -> None:
        rows, embeddings = grid[0] * grid[1] * grid[2], towers.reference.embeddings
        metadata = towers.wrapped.metadata([grid])
        row, column = metadata["position_ids"].unbind(1)
        frames = by_frame(torch.tensor([grid]))
        lengths = frames[:, 1] * frames[:, 2]
        expected = embeddings(torch.zeros(rows, 32), lengths, frames, row, column)
        got = towers.wrapped._positions(metadata["interp_indices"], metadata["interp_weights"])
        assert expected.std() > 0.1
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)

    def test_taps_of_pad_rows_are_in_the_table(self, towers: Towers) -> None:
        captured = towers.wrapped.prepare_encoder_cudagraph_capture_inputs(
            16, 4, 8, torch.device("cpu"), torch.float32
        ).values
        entries = towers.reference.embeddings.position_embedding.num_embeddings
        assert 0 <= captured["interp_indices"].min() <= captured["interp_indices"].max() < entries


class TestGlm4vMoe(TestGlm4v):
    @classmethod
    def make_tower(cls) -> nn.Module:
        return glm4v(blocks=3, moe=True)
