"""Adapters of towers of tiles of one size: InternVL, Llama 4, Idefics 3 and SmolVLM, SigLIP 2."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fxsplit_encoder._torch.tensors import linked_copy
from fxsplit_encoder._torch.transformers import install_output_hooks, llama4_angles
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.kernels.attention.hugging_face import use_dense_attention
from fxsplit_encoder.towers.base import with_own_attention
from fxsplit_encoder.towers.grid import rotate_pairs
from fxsplit_encoder.towers.inputs import integer_rows, number_of, pixel_parts
from fxsplit_encoder.towers.tiles import DenseTower, View

_CONFIGURED = ("vision_feature_layer", "vision_feature_select_strategy")


class InternVLTower(DenseTower):
    """Wraps what surrounds the language model in `InternVLModel`; called, it is `get_image_features`.

    A frame of a video is a tile. An item's embedding is (256 * tiles, text hidden size) with 448 x 448 tiles.
    """

    model: Any
    modalities: Sequence[str] = ("image", "video")
    has_plain_blocks = True

    def __init__(self, model: nn.Module) -> None:
        inner: Any = getattr(model, "model", model)  # of InternVLForConditionalGeneration
        config = inner.config
        height, width = config.vision_config.image_size
        patch_height, patch_width = config.vision_config.patch_size
        tokens = int((height // patch_height) * (width // patch_width) * config.downsample_ratio**2)
        super().__init__(
            inner.vision_tower,
            View("pixel_values", (config.vision_config.num_channels, height, width), tokens),
            config.text_config.hidden_size,
            children={name: getattr(inner, name) for name in ("vision_tower", "multi_modal_projector")},
        )
        # Not a submodule: the language model's parameters are none of this module's.
        object.__setattr__(self, "model", inner)
        use_dense_attention(inner.vision_tower)
        # Here rather than in the first forward, which would take a lock that Dynamo does not trace: from
        # transformers 5.23 on every forward looks for them, whatever layer it returns.
        install_output_hooks(inner.vision_tower)

    def matters(self, option: str, value: Any) -> bool:
        """Whether an option changes what the model returns: not one that says what its configuration does."""
        if option in _CONFIGURED:
            return value not in (None, getattr(self.model.config, option))
        return super().matters(option, value)

    def call(self, tiles: Tensor) -> Any:
        """`InternVLModel.get_image_features`."""
        # By the class, so that a model whose method was replaced by this module does not call itself.
        return type(self.model).get_image_features(self.model, tiles)

    def call_tower(self, *args: Any, **kwargs: Any) -> Any:
        """The same with the model's own options and attention."""
        model: Any = with_own_attention(self.model)
        return type(model).get_image_features(model, *args, **kwargs)

    def features(self, tiles: Tensor) -> Tensor:
        """The projected features, by the layer and the strategy that the configuration names."""
        features: Tensor = self.call(tiles).pooler_output
        return features


# --- Llama 4: its rotary embedding in real numbers


class Llama4Tower(DenseTower):
    """Wraps what surrounds the language model in `Llama4ForConditionalGeneration`, called as its
    `get_image_features`, or the bare `Llama4VisionModel`. An embedding is (144 * tiles, text hidden size)
    with 336 x 336 tiles, projected; a bare tower's is not projected.
    """

    count_keys: ClassVar[tuple[str, ...]] = ("num_patches", "image_num_patches", "patches_per_image")

    def __init__(self, model: nn.Module) -> None:
        tower: Any = getattr(model, "vision_model", model)
        projector: Any = getattr(model, "multi_modal_projector", None)
        config = tower.config
        shape = config.num_channels, config.image_size, config.image_size
        tokens = int((config.image_size // config.patch_size) ** 2 * config.pixel_shuffle_ratio**2)
        width, children = config.projector_output_dim, None
        if projector is not None:
            width = projector.linear_1.out_features
            children = {"vision_model": tower, "multi_modal_projector": projector}
        super().__init__(tower, View("pixel_values", shape, tokens), width, children)
        self.projects = projector is not None
        _use_real_rotary(tower)

    def features(self, tiles: Tensor) -> Tensor:
        """The projected features."""
        features: Tensor = self.tower(tiles, return_dict=True).last_hidden_state
        return self.multi_modal_projector(features) if self.projects else features

    def image_counts(self, mm_kwargs: dict[str, Any]) -> Any:
        """The tiles of every image, else by its `aspect_ratios` (rows, columns), one more for several."""
        counts, ratios = super().image_counts(mm_kwargs), mm_kwargs.get("aspect_ratios")
        if counts is not None or ratios is None:
            return counts
        total = sum(part.shape[0] for part in pixel_parts(mm_kwargs.get(self.input_name), self.input_name))
        if number_of(ratios) > total:
            raise InputError(
                f"aspect_ratios: expected one per image; got {number_of(ratios)} for {total} tiles"
            )
        listed = integer_rows(ratios, "aspect_ratios", 2, "rows of two integers (rows, columns of tiles)")
        return [rows * columns + (rows * columns > 1) for rows, columns in listed]


def _use_real_rotary(tower: Any) -> None:
    """Replaces rotary embedding and attention by ones without complex numbers, for Inductor."""
    if isinstance(tower.rotary_embedding, _RealRotaryEmbedding):
        return
    tower.rotary_embedding = _RealRotaryEmbedding(tower.rotary_embedding, tower.device)
    for layer in tower.model.layers:
        layer.self_attn = _RealAttention(layer.self_attn)


class _RealRotaryEmbedding(nn.Module):
    """Cosines and sines of every patch's angles, (2, patches, 1, head_dim / 2)."""

    def __init__(self, rotary_embedding: Any, device: torch.device) -> None:
        super().__init__()
        # Computed again, in float32: a cast of the tower casts its buffer too, and drops the imaginary part.
        angles = llama4_angles(rotary_embedding)
        table = torch.stack([angles.real, angles.imag]).to(device)
        self.register_buffer("table", table, persistent=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        table = self.table
        assert isinstance(table, torch.Tensor)
        return table


class _RealAttention(nn.Module):
    """`Llama4VisionAttention` with its own projections. Neighboring pairs of a head are rotated."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.head_dim = attention.head_dim
        self.q_proj = attention.q_proj
        self.k_proj = attention.k_proj
        self.v_proj = attention.v_proj
        self.o_proj = attention.o_proj

    def forward(
        self, hidden_states: Tensor, freqs_ci: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        projected = [proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (x.view(*x.shape[:-1], -1, self.head_dim) for x in projected)
        cos, sin = freqs_ci.unbind(0)
        q, k = rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o_proj(attended.transpose(1, 2).flatten(2)), None


# --- Idefics 3 and SmolVLM: SigLIP, whose positions follow from the mask of each image


class Idefics3Tower(DenseTower):
    """Wraps `Idefics3VisionTransformer` and `SmolVLMVisionTransformer` for images of one size without
    padding. An embedding is (patches, hidden_size) of each of the hidden states `layers`, before the model's
    connector: 0 is the input of the first layer, None the tower's output.
    """

    def __init__(self, tower: nn.Module, height: int, width: int, layers: Sequence[int | None]) -> None:
        config: Any = tower.config
        tokens = (height // config.patch_size) * (width // config.patch_size) * len(layers)
        view = View("pixel_values", (config.num_channels, height, width), tokens)
        super().__init__(tower, view, config.hidden_size)
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
    recording, looked_up = linked_copy(embeddings), list[Tensor]()
    table: Any = recording.position_embedding
    table.register_forward_pre_hook(lambda module, args: looked_up.extend(args))
    weight: Tensor = embeddings.patch_embedding.weight
    channels, height, width = shape
    side = embeddings.patch_size
    mask = torch.ones(1, height // side, width // side, dtype=torch.bool, device=weight.device)
    recording(weight.new_zeros(1, channels, height, width), mask)
    return looked_up[0]


# --- SigLIP 2: images of up to a number of patches, each of its own shape

# A patch's row and column, and how many of them its image has: high digits, then low ones, since 16 bits of a
# floating point number are exact to 256 alone.
_DIGIT = 256
_PLACE = 8


class Siglip2Tower(DenseTower):
    """Wraps `Siglip2VisionModel`. A tile is an image as (1, patches, columns), see `siglip2_tiles`: a patch's
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
        pools = bool(getattr(tower, "use_head", True))
        if pooled_alone and not pools:
            raise InputError("pooled_alone: expected a tower with a head; got one without")
        shape = (1, patches, self.patch_features + _PLACE + 1)
        view = View("pixel_values", shape, 1 if pooled_alone else patches + pools)
        super().__init__(tower, view, config.hidden_size)
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
def siglip2_tiles(
    pixels: Tensor, mask: Tensor, shapes: Sequence[Sequence[int]], like: Tensor | None = None
) -> Tensor:
    """(images, 1, patches, columns) of pixels (images, patches, features), a mask (images, patches) of those
    that exist, and rows and columns of every image; float32 on the CPU, or in the dtype of `like` on its
    device.
    """
    dtype, device = (torch.float32, "cpu") if like is None else (like.dtype, like.device)
    places = torch.stack([_places_of(*s, pixels.shape[1], dtype, device) for s in shapes])
    return torch.cat([pixels.to(device, dtype), places, mask.to(device, dtype)[..., None]], dim=-1)[:, None]


@functools.lru_cache(maxsize=512)
def _places_of(height: int, width: int, patches: int, dtype: torch.dtype, device: Any) -> Tensor:
    """(patches, digits) of an image of `height` rows of `width` patches, and `patches` after padding: where
    the patches are; those that are none lie at the first.
    """
    places = torch.tensor([0, 0, height, width], device="cpu").repeat(patches, 1)
    patch = torch.arange(height * width, device="cpu")
    places[: height * width, 0], places[: height * width, 1] = patch // width, patch % width
    return torch.cat([places // _DIGIT, places % _DIGIT], dim=-1).to(device, dtype)
