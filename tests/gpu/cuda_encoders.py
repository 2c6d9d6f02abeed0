"""Encoders on a GPU that the tests run in other processes, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxsplit_encoder.connector.interfaces import FeatureEncoder, Modality, PreparedItem


class SlowEncoder(FeatureEncoder):
    """Twice the pixels, after work that keeps the GPU busy long after `encode` has returned."""

    def __init__(self, device: str, width: int = 8, products: int = 100) -> None:
        self.device: torch.device = torch.device(device)
        self.width = width
        self._products = products
        self.streams: set[torch.cuda.Stream] = set()
        """That batches were computed on."""

    def start(self) -> None:
        self.load = torch.randn(4096, 4096, device=self.device)
        torch.cuda.synchronize(self.device)

    def row_bytes(self, modality: Modality) -> int | None:
        return 4 * self.width

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        self.streams.add(torch.cuda.current_stream(self.device))
        inputs = [item.inputs["pixel_values"].to(self.device) for item in items]
        product = self.load
        for _ in range(self._products):
            product = (product @ self.load).clamp(-1, 1)
        late = 0 * product[0, 0]  # so that every feature waits for the products
        return [2 * pixels + late for pixels in inputs]


def slow(device: str = "cuda:0") -> SlowEncoder:
    return SlowEncoder(device)
