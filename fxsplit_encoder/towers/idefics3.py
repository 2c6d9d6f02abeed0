"""The vision towers of Idefics 3 and SmolVLM: SigLIP's, with positions that follow from each image's mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fxsplit_encoder._torch.tensors import linked_copy
from fxsplit_encoder.kernels.attention.hugging_face import use_dense_attention
from fxsplit_encoder.towers.tiles import DenseTower


class Idefics3Tower(DenseTower):
    """Wraps `Idefics3VisionTransformer` and `SmolVLMVisionTransformer` for images of one size without
    padding. An embedding is (patches, hidden_size) of each of the hidden states `layers`, before the model's
    connector: 0 is the input of the first layer, None the tower's output.
    """

    def __init__(self, tower: nn.Module, height: int, width: int, layers: Sequence[int | None]) -> None:
        config: Any = tower.config
        super().__init__(
            tower,
            tile_shape=(config.num_channels, height, width),
            tokens_per_tile=(height // config.patch_size) * (width // config.patch_size) * len(layers),
            out_hidden_size=config.hidden_size,
        )
        self.layers = layers
        self.has_plain_blocks = [*layers] == [None]  # hidden states are what blocks return
        use_dense_attention(tower)
        self.positions = _positions(self.tower.embeddings, self.tile_shape)
        """(1, patches): rows of the position table."""

    def features(self, tiles: Tensor) -> Tensor:
        """The hidden states of images without padding, whose attention needs no mask."""
        tower = self.tower
        embeddings = tower.embeddings
        patches = embeddings.patch_embedding(tiles).flatten(2).transpose(1, 2)
        hidden = patches + embeddings.position_embedding(self.positions)
        states = [hidden]
        for layer in tower.encoder.layers:
            states.append(layer(states[-1], None))
        parts = [tower.post_layernorm(states[-1]) if n is None else states[n] for n in self.layers]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def call(self, tiles: Tensor) -> Any:
        """The same in the tower's own output."""
        features: Any = self.features(tiles)
        return BaseModelOutput(last_hidden_state=features)


@torch.no_grad()
def _positions(embeddings: Any, shape: tuple[int, ...]) -> Tensor:
    """The tower's positions for an image without padding, rounded in the dtype of the pixels."""
    recording, recorder = linked_copy(embeddings), _Recorder()
    recording.position_embedding = recorder
    weight: Tensor = embeddings.patch_embedding.weight
    channels, height, width = shape
    side = embeddings.patch_size
    mask = torch.ones(1, height // side, width // side, dtype=torch.bool, device=weight.device)
    recording(weight.new_zeros(1, channels, height, width), mask)
    return recorder.positions


class _Recorder(nn.Module):
    """Replaces a position table and records the positions that are looked up."""

    positions: Tensor

    def forward(self, positions: Tensor) -> Tensor:
        self.positions = positions
        return positions.new_zeros(*positions.shape, 1, dtype=torch.float32)
