"""`invariant: true` on the device: packings of 40 images and videos in every mode, all bits equal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.kernels.attention import KERNELS, KernelChooser, KnownSegments
from fxsplit_encoder.kernels.attention.chooser import choosing, invariant_names
from fxsplit_encoder.kernels.attention.op import attend
from fxsplit_encoder.kernels.choice import measuring
from fxsplit_encoder.kernels.products.fixed import GELU_TANH, NOTHING, fixed_linear, library_product
from fxsplit_encoder.models.random import demo_tower
from fxsplit_encoder.models.registry import architecture
from tests.manager.packings import differing, packed_items, packings, tile_items
from tests.towers.tiny_inputs import Inputs, Item, PackedInputs, TileInputs

pytestmark = pytest.mark.gpu

BLOCKS = 3
MODES = ("full", "piecewise", "exact", "none", "auto")
# (in, out) features of Qwen3-VL-8B and InternVL3-8B.
LAYERS = [(1152, 3456), (1152, 1152), (1152, 4304), (4304, 1152), (4608, 4608), (1024, 4096), (4096, 1024)]
DTYPES = [torch.bfloat16, torch.float16]
EPILOGUES = [(True, NOTHING), (False, NOTHING), (True, GELU_TANH)]


class WholeTiles(TileInputs):
    """Tiles of InternVL3's own size."""

    TILE: ClassVar[tuple[int, int, int]] = (3, 448, 448)
    TOKENS: ClassVar[int] = 256


class Encoders(NamedTuple):
    inputs: Inputs
    items: list[Item]
    managers: dict[str, Any]
    alone: dict[Item, Tensor]
    num_packings: int


def make_encoders(model: str) -> Encoders:
    wrapped = architecture(model).family.wrap(demo_tower(BLOCKS, "cuda", torch.bfloat16, model=model))
    if "internvl" in model:
        inputs: Inputs = WholeTiles()
        # Fewer: their pixels take the host long.
        items, budgets, num_packings = tile_items(40), (256, 1024, 3072), 200
    else:
        inputs = PackedInputs(patch_shape=(wrapped.patch_features,))
        # Sides to 16 patches: the sides of `packed_items` are small.
        items = [
            item._replace(size=(t, 2 * h, 2 * w)) if item.seed % 3 else item
            for item in packed_items(40)
            for t, h, w in [item.size]
        ]
        budgets, num_packings = (16, 64, 256, 512), 500
    managers = {}
    for mode in MODES:
        config = fx.EncoderConfig(
            mode=mode,
            invariant=True,
            packing="cost" if mode == "auto" else "greedy",  # which replays what fits, whatever it costs
            token_budgets=budgets,
            max_items_per_batch=8,
            max_frames_per_batch=16,
            exact_min_hits=2,
        )
        managers[mode] = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
        managers[mode].capture()
    alone = {item: managers["none"].execute(inputs.make([item]))[0] for item in items}
    return Encoders(inputs, items, managers, alone, num_packings)


@pytest.fixture(scope="module", params=["qwen3-vl-8b", "internvl3-8b"])
def encoders(request: pytest.FixtureRequest) -> Iterator[Encoders]:
    made = make_encoders(request.param)
    yield made
    for manager in made.managers.values():
        manager.clear()


@pytest.mark.timeout(3000)
def test_bits_are_those_of_an_item_alone_in_any_packing(encoders: Encoders) -> None:
    for number, batches in enumerate(packings(encoders.items, encoders.num_packings)):
        mode = MODES[number % len(MODES)]
        found = differing(encoders.managers[mode], encoders.inputs, batches, encoders.alone)
        assert found == [], (mode, found[:3], encoders.managers[mode].reports)
    for mode in ("full", "piecewise", "exact"):
        assert encoders.managers[mode].stats().hits > 0, mode


def test_a_second_tower_of_the_same_weights_gives_the_same_bits(encoders: Encoders) -> None:
    """As another rank has it: traced, compiled and captured again."""
    manager = encoders.managers["full"]
    config = manager.config.replace(
        token_budgets=tuple(3 * budget for budget in manager.limits.path_budgets["default"])
    )
    other = fx.EncoderCudaGraphManager(manager.tower, config, log_interval=0)
    other.capture()
    for batches in packings(encoders.items, 3, seed=7):
        assert differing(other, encoders.inputs, batches, encoders.alone) == []
    other.clear()


def test_results_are_the_towers_but_for_rounding(encoders: Encoders) -> None:
    tower = encoders.managers["full"].tower
    for item in encoders.items[:6]:
        with torch.no_grad():
            expected = tower.encoder_eager_forward(encoders.inputs.make([item]), path="default")
        got = encoders.alone[item].float()
        error = (got - expected.reshape(got.shape).float()).norm() / expected.float().norm()
        assert error < 0.05


# --- products


def by_our_kernel(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    from fxsplit_encoder.kernels.products.triton_kernels import product

    return product(rows.clone(), matrix, bias, gelu=activation == GELU_TANH)


PRODUCTS = [
    *itertools.product([fixed_linear], LAYERS, DTYPES),
    *itertools.product([by_our_kernel], [*LAYERS[:4], (100, 70), (24, 3)], [*DTYPES, torch.float32]),
]


@pytest.mark.parametrize(("multiply", "layer", "dtype"), PRODUCTS)
@pytest.mark.parametrize(("has_bias", "activation"), EPILOGUES)
@torch.no_grad()
def test_a_layer_is_right_and_has_the_same_bits_at_any_count(
    multiply: Any, layer: tuple[int, int], dtype: torch.dtype, has_bias: bool, activation: str
) -> None:
    in_features, out_features = layer
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(5003, in_features, device="cuda", generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, device="cuda", generator=generator).to(dtype)
    bias = torch.randn(out_features, device="cuda", generator=generator).to(dtype) if has_bias else None
    together = multiply(rows, weight.t(), bias, activation)
    exact = rows.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    exact = F.gelu(exact, approximate="tanh") if activation else exact
    allowed = 4 if multiply is fixed_linear else 8
    error = float((together.double() - exact).norm() / exact.norm())
    assert error < max(allowed * torch.finfo(dtype).eps, 5e-6)
    for count in (1, 2, 3, 5, 15, 16, 17, 63, 127, 128, 129, 196, 257, 784, 1000, 3136, 4999):
        assert torch.equal(multiply(rows[:count], weight.t(), bias, activation), together[:count]), count
        last = multiply(rows[-count:], weight.t(), bias, activation)
        assert torch.equal(last, together[-count:]), count
    with measuring():
        assert torch.equal(multiply(rows[:1234], weight.t(), bias, activation), together[:1234])


def test_the_settings_of_the_process_stay() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    rows = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    library_product(rows, rows.t().contiguous(), None, NOTHING)
    assert matmul.allow_bf16_reduced_precision_reduction == before
    if hasattr(matmul, "allow_bf16_reduced_precision_reduction_split_k"):
        assert matmul.allow_bf16_reduced_precision_reduction_split_k


# --- attention


@pytest.mark.parametrize("kernel", [kernel.name for kernel in KERNELS if kernel.is_invariant])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
@torch.no_grad()
def test_a_segment_has_the_bits_that_it_gets_alone(kernel: str, head_dim: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if kernel not in invariant_names(KERNELS, device):
        pytest.skip(f"{kernel} cannot run here, or not so")
    lengths = [196, 0, 1, 64, 784, 129, 3136, 17, 0, 0]
    boundaries = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    q, k, v = torch.randn(boundaries[-1], 3, 16, head_dim, device=device, dtype=torch.bfloat16).unbind(1)
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=device)
    with choosing(KernelChooser(kernel, invariant=True)), measuring():
        bound = attend(q, k, v, cu_seqlens, boundaries[-1], head_dim**-0.5)
        known = KnownSegments(cu_seqlens, boundaries).attend(q, k, v, head_dim**-0.5)
        for start, end in itertools.pairwise(boundaries):
            if end == start:
                continue
            alone = torch.tensor([0, end - start], dtype=torch.int32, device=device)
            own = [each[start:end].clone() for each in (q, k, v)]
            expected = attend(own[0], own[1], own[2], alone, end - start, head_dim**-0.5)
            assert torch.equal(bound[start:end], expected), (start, end)
            assert torch.equal(known[start:end], expected), (start, end)


# --- what is refused


def test_a_tower_in_float32_and_eager_pieces_are_refused(towers: Any) -> None:
    config = fx.EncoderConfig(invariant=True, token_budgets=(16, 64))
    with pytest.raises(ConfigError, match="invariant: no kernel attends to"):
        fx.EncoderCudaGraphManager(fx.wrap(towers[1]), config).capture()
    with pytest.raises(ConfigError, match="piece_compiler: contradicts invariant"):
        fx.EncoderCudaGraphManager(towers[2], config.replace(piece_compiler="eager")).capture()
