"""SigLIP 2's vision tower of variable shapes: images of up to a number of patches, each of its own shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.tensors import version_of
from fxsplit_encoder.attention.hugging_face import use_dense_attention
from fxsplit_encoder.towers.dense import DenseTower

_MOST_SHAPES = 512


class Siglip2Tower(DenseTower):
    """Wraps `Siglip2VisionModel`.

    A "tile" is an image as (1, patches, columns): the features of each patch, the row that the position table
    has for it at this image's shape, and whether it is one of the image's. `images` makes them. So what
    depends on shapes is made on the host, and the graph sees images of one size.

    An image's embedding is (patches + 1, hidden_size): the last hidden state, and the pooled one where the
    tower has a head.

    Args:
        patches: of an image at most, as the image processor pads it.
    """

    attends_with_mask = True
    declares_padding = True

    def __init__(self, tower: nn.Module, patches: int) -> None:
        config: Any = tower.config
        self.patch_features: int = config.num_channels * config.patch_size**2
        self.width: int = config.hidden_size
        pools = bool(getattr(tower, "use_head", True))
        super().__init__(
            tower,
            tile_shape=(1, patches, self.patch_features + self.width + 1),
            tokens_per_tile=patches + pools,
            out_hidden_size=self.width,
        )
        self.patches = patches
        self.pools = pools
        self._positions: dict[tuple[Any, ...], Tensor] = {}
        use_dense_attention(tower)

    def features(self, tiles: Tensor) -> Tensor:
        """The last hidden state of every patch, also of those that are none, then the pooled one."""
        tower = self.tower
        columns = [self.patch_features, self.width, 1]
        pixels, positions, own = torch.split(tiles[:, 0], columns, dim=-1)
        mask = own[..., 0] > 0.5
        hidden = tower.embeddings.patch_embedding(pixels) + positions
        output = tower.encoder(inputs_embeds=hidden, attention_mask=mask[:, None, None])
        hidden = tower.post_layernorm(output.last_hidden_state)
        return torch.cat([hidden, self._pooled(hidden, mask)[:, None]], dim=1) if self.pools else hidden

    def _pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """The tower's head: attention of one probe over an image's patches. The head itself asks the host
        whether a mask is whole.
        """
        head = self.tower.head
        probe = head.probe.repeat(hidden.shape[0], 1, 1)
        bias = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, torch.finfo(hidden.dtype).min)
        per_head = bias[:, None, None].expand(-1, head.num_heads, 1, -1).flatten(0, 1)
        attended = head.attention(probe, hidden, hidden, attn_mask=per_head)[0]
        pooled: Tensor = attended + head.mlp(head.layernorm(attended))
        return pooled[:, 0]

    @torch.no_grad()
    def images(self, pixels: Tensor, mask: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """(images, 1, patches, columns).

        Args:
            pixels: (images, patches, features).
            mask: (images, patches), which are the image's.
            shapes: rows and columns of every image.
        """
        weight: Tensor = self.tower.embeddings.patch_embedding.weight
        positions = torch.stack([self._positions_of(shape) for shape in shapes])
        own = mask.to(weight.device, weight.dtype)[..., None]
        return torch.cat([pixels.to(weight.device, weight.dtype), positions, own], dim=-1)[:, None]

    def _positions_of(self, shape: tuple[int, int]) -> Tensor:
        """(patches, hidden_size): the position table resized, as the tower itself does it."""
        embeddings: Any = self.tower.embeddings
        table: Tensor = embeddings.position_embedding.weight
        version = None if table.is_inference() else version_of(table)
        key = (shape, table.data_ptr(), version, table.dtype, table.device)
        if key not in self._positions:
            if len(self._positions) >= _MOST_SHAPES:
                self._positions.clear()
            side = embeddings.position_embedding_size
            self._positions[key] = embeddings.resize_positional_embeddings(
                table.view(side, side, -1), torch.tensor([shape], device="cpu"), max_length=self.patches
            )[0]
        return self._positions[key]
