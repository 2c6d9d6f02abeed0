"""SigLIP 2's vision tower of variable shapes: images of up to a number of patches, each of its own shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.kernels.attention.hugging_face import use_dense_attention
from fxsplit_encoder.towers.tiles import DenseTower

# A patch's row and column, and how many of them its image has: high digits, then low ones, since 16 bits of a
# floating point number are exact to 256 alone.
_DIGIT = 256
_PLACE = 8


class Siglip2Tower(DenseTower):
    """Wraps `Siglip2VisionModel`. A tile is an image as (1, patches, columns), made by `images`: each patch's
    features, its place in an image of this shape, and whether it exists. `patches` is the number to which the
    image processor pads. An embedding is (patches + 1, hidden_size): the last hidden state, and the pooled
    one if the tower has a head.

    Args:
        pooled_alone: whether an embedding is the pooled state alone, (1, hidden_size).

    Raises:
        InputError: `pooled_alone`, and the tower has no head.
    """

    attends_with_mask = True
    declares_padding = True

    def __init__(self, tower: nn.Module, patches: int, *, pooled_alone: bool = False) -> None:
        config: Any = tower.config
        self.patch_features: int = config.num_channels * config.patch_size**2
        self.width: int = config.hidden_size
        pools = bool(getattr(tower, "use_head", True))
        if pooled_alone and not pools:
            raise InputError("pooled_alone: expected a tower with a head; got one without")
        super().__init__(
            tower,
            tile_shape=(1, patches, self.patch_features + _PLACE + 1),
            tokens_per_tile=1 if pooled_alone else patches + pools,
            out_hidden_size=self.width,
        )
        self.patches = patches
        self.pools, self.pooled_alone = pools, pooled_alone
        use_dense_attention(tower)

    def features(self, tiles: Tensor) -> Tensor:
        """The last hidden state of every patch, also of those that are none, then the pooled one."""
        tower = self.tower
        columns = [self.patch_features, _PLACE, 1]
        pixels, places, own = torch.split(tiles[:, 0], columns, dim=-1)
        mask = own[..., 0] > 0.5
        hidden = tower.embeddings.patch_embedding(pixels) + self._positions(places)
        output = tower.encoder(inputs_embeds=hidden, attention_mask=mask[:, None, None])
        hidden = tower.post_layernorm(output.last_hidden_state)
        if self.pooled_alone:
            return self._pooled(hidden, mask)[:, None]
        return torch.cat([hidden, self._pooled(hidden, mask)[:, None]], dim=1) if self.pools else hidden

    def _positions(self, places: Tensor) -> Tensor:
        """(tiles, patches, hidden_size): the position table, resized to each shape as by the tower."""
        embeddings = self.tower.embeddings
        table, side = embeddings.position_embedding.weight, embeddings.position_embedding_size
        high, low = places.float().chunk(2, dim=-1)
        index, size = (_DIGIT * high + low)[..., None].chunk(2, dim=-2)
        scale = side / size.clamp(min=1)  # a tile that is no image has none
        entries = torch.arange(side, device=places.device, dtype=torch.float32)
        distance = (entries + 0.5 - scale * (index + 0.5)).abs() / scale.clamp(min=1)
        weights = (1 - distance).clamp(min=0)
        rows, columns = (weights / weights.sum(dim=-1, keepdim=True)).unbind(dim=-2)
        both = (rows[..., :, None] * columns[..., None, :]).flatten(-2)
        positions: Tensor = (both @ table.float()).to(table.dtype)
        return positions

    def _pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """The tower's head, attention of one probe, without its check on the host for a whole mask."""
        head = self.tower.head
        probe = head.probe.repeat(hidden.shape[0], 1, 1)
        bias = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, torch.finfo(hidden.dtype).min)
        per_head = bias[:, None, None].expand(-1, head.num_heads, 1, -1).flatten(0, 1)
        attended = head.attention(probe, hidden, hidden, attn_mask=per_head)[0]
        pooled: Tensor = attended + head.mlp(head.layernorm(attended))
        return pooled[:, 0]

    @torch.no_grad()
    def images(self, pixels: Tensor, mask: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """(images, 1, patches, columns) of pixels (images, patches, features), a mask (images, patches) of
        those that exist, and rows and columns of every image.
        """
        weight: Tensor = self.tower.embeddings.patch_embedding.weight
        places = torch.stack([places_of(*s, self.patches, weight.dtype, weight.device) for s in shapes])
        own = mask.to(weight.device, weight.dtype)[..., None]
        return torch.cat([pixels.to(weight.device, weight.dtype), places, own], dim=-1)[:, None]


@functools.lru_cache(maxsize=512)
def places_of(
    height: int, width: int, patches: int, dtype: torch.dtype = torch.float32, device: Any = "cpu"
) -> Tensor:
    """(patches, digits) of an image of `height` rows of `width` patches, and `patches` after padding: where
    the patches are; those that are none lie at the first.
    """
    places = torch.tensor([0, 0, height, width], device="cpu").repeat(patches, 1)
    patch = torch.arange(height * width, device="cpu")
    places[: height * width, 0], places[: height * width, 1] = patch // width, patch % width
    return torch.cat([places // _DIGIT, places % _DIGIT], dim=-1).to(device, dtype)
