"""Modules that nobody wrapped: whatever Dynamo hands over, the results are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.backend import BudgetDispatcher, dispatch, dispatchers

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compile_it(module: Any, **settings: Any) -> Any:
    dynamic = settings.pop("dynamic", None)
    return torch.compile(module, backend="encoder_cg", dynamic=dynamic, options=settings)


def assert_equal(got: Any, expected: Any) -> None:
    """Tensors and structures of them; the shapes, dtypes and strides too."""
    assert type(got) is type(expected)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert got.stride() == expected.stride()
    elif isinstance(expected, tuple | list):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_equal(a, b)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_equal(got[key], expected[key])
    else:
        assert got == expected


class ClipLike(nn.Module):
    """Dense attention over a batch of images. (A first batch of 3 would be traced as the channel count.)"""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 4, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.dropout = dropout

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        for norm, qkv, out in zip(self.norms, self.qkv, self.out, strict=False):
            q, k, v = qkv(norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0.0
            )
            x = x + out(attended.transpose(1, 2).flatten(2))
        return self.norms[-1](x).mean(1)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x)).relu().flatten(1)


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 2.0) -> Any:
        y = self.linear(x)
        return y, None, x.shape[0], (x, [y * scale, x.shape[0] * 2]), {"view": y.view(-1), "same": y}


class ReadsValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item() + x[: int(x.abs().max().item()) + 1].sum()


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        x[:, 0].mul_(3)
        return x.t()


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = ClipLike()

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x)
        torch._dynamo.graph_break()
        # Behind a layer norm all features together are 0, up to rounding.
        y = y - y.mean(0) if y[..., 0].sum() > 0 else y + y.mean(0)
        print(end="")
        return y * 2


class Dropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training) + torch.rand_like(x)


class DataDependent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0].relu()


def images(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 3, 8, 8, dtype=dtype)


def rows(count: int) -> Tensor:
    return torch.randn(count, 4)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), rows),
    "convolutions in training": (ConvNet, images),
    "many outputs": (ManyOutputs, rows),
    "reads values": (ReadsValues, rows),
    "in place": (InPlace, rows),
    "graph breaks": (Breaks, images),
    "dropout in training": (Dropout, rows),
    "data-dependent shape": (DataDependent, rows),
    "dense attention": (ClipLike, images),
    "attention with dropout": (lambda: ClipLike(dropout=0.5), images),
}
SLOW_CASES = ("graph breaks", "reads values")
MORE_CASES = ("attention with dropout",)  # "dropout in training" and "dense attention" in one


@pytest.mark.parametrize("inference", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.slow] * (name in SLOW_CASES) + [pytest.mark.exhaustive] * (name in MORE_CASES),
        )
        for name in CASES
    ],
)
def test_any_module_gives_eagers_results(name: str, inference: bool) -> None:
    make, make_input = CASES[name]
    torch.manual_seed(0)
    module = make().train()
    eager = copy.deepcopy(module)
    compiled = compile_it(module, token_budgets=[2, 4, 16])
    for count in (3, 5, 5, 1, 8, 17, 0, 3):
        if count == 0 and name in ("convolutions in training", "reads values"):
            continue  # eager refuses
        with torch.inference_mode() if inference else torch.no_grad():
            x = make_input(count)
            again = x.clone()
            torch.manual_seed(count)
            got = compiled(x)
            torch.manual_seed(count)
            expected = eager(again)
        assert_equal(got, expected)
        assert_equal(x, again)
    for (key, value), expected in zip(module.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, msg=key)


@pytest.mark.slow
def test_inference_mode_and_no_grad_take_turns() -> None:
    module = ClipLike()
    compiled = compile_it(module, dynamic=True, token_budgets=[4])
    kept = []
    for turn in range(6):
        with torch.inference_mode() if turn % 2 else torch.no_grad():
            x = images(2 + turn % 3)
            kept.append((compiled(x), module(x)))
    for got, expected in kept:
        torch.testing.assert_close(got, expected)
        assert not got.requires_grad


@pytest.mark.slow
@torch.no_grad()
def test_inputs_of_other_layouts_and_dtypes() -> None:
    module = ClipLike()
    compiled = compile_it(module, dynamic=True, token_budgets=[4, 8])
    x = images(3)
    for y in (
        x.to(memory_format=torch.channels_last),
        images(6)[::2],
        x.flip(0).transpose(2, 3),
        images(1).expand(3, -1, -1, -1),
    ):
        torch.testing.assert_close(compiled(y), module(y))
    double = ClipLike().double()
    y = images(3, torch.float64)
    torch.testing.assert_close(compile_it(double, dynamic=True)(y), double(y), rtol=1e-12, atol=1e-12)


@pytest.fixture
@torch.no_grad()
def clip() -> Any:
    torch.manual_seed(1)
    module = ClipLike().requires_grad_(False)
    known = set(dispatchers())
    compiled = compile_it(module, dynamic=True, token_budgets=[2, 4, 8], debug=True)
    compiled(images(5))
    (dispatcher,) = set(dispatchers()) - known
    return module, compiled, dispatcher


@torch.no_grad()
@settings(max_examples=40)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=4), st.integers(0, 99))
def test_any_batch_of_a_dense_module_is_padded_to_a_budget(clip: Any, counts: list[int], seed: int) -> None:
    module, compiled, dispatcher = clip
    torch.manual_seed(seed)
    for count in counts:
        hits, misses = dispatcher.hits, dispatcher.misses.total()
        x = images(count)
        torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=1e-5)
        assert (dispatcher.hits - hits, dispatcher.misses.total() - misses) == (
            (1, 0) if count <= 8 else (0, 1)
        )
    assert set(dispatcher.misses) <= {fx.MissReason.OVER_LARGEST_BUDGET}
    assert dispatcher.num_captured <= 3


@torch.no_grad()
def test_budgets_are_captured_on_first_use_and_released_by_clear(clip: Any) -> None:
    module, compiled, dispatcher = clip
    assert dispatcher.num_captured == 1
    compiled(images(7))
    assert dispatcher.num_captured == 1
    compiled(images(4))
    assert dispatcher.num_captured == 2
    dispatcher.clear()
    assert dispatcher.num_captured == 0
    x = images(8)
    torch.testing.assert_close(compiled(x), module(x))
    assert dispatcher.num_captured == 1


@pytest.mark.parametrize(
    ("settings_", "reason"),
    [
        ({"enabled": False}, fx.MissReason.DISABLED),
        pytest.param({"mode": "none"}, fx.MissReason.DISABLED, marks=pytest.mark.exhaustive),
        ({"token_budgets": [2]}, fx.MissReason.OVER_LARGEST_BUDGET),
        ({"token_budgets": [8], "max_graph_bytes": 1}, fx.MissReason.NOT_CAPTURED),
    ],
)
@torch.no_grad()
def test_every_miss_has_its_reason(settings_: dict[str, Any], reason: fx.MissReason) -> None:
    module = ClipLike()
    known = set(dispatchers())
    compiled = compile_it(module, dynamic=True, **settings_)
    x = images(5)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), module(x))
    (dispatcher,) = set(dispatchers()) - known
    assert (dispatcher.hits, dispatcher.misses) == (0, {reason: 2})


class MeanOverImages(ClipLike):
    def forward(self, images: Tensor) -> Tensor:
        y = super().forward(images)
        return y - y.amax(0)


class SortsColumns(ClipLike):
    """Harmless, and no rule knows it."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).sort(dim=1).values


def compiled_with_dispatcher(module: nn.Module, first: Tensor, **settings: Any) -> tuple[Any, Any]:
    """The compiled module, traced by a first call, and its dispatcher."""
    known = set(dispatchers())
    compiled = compile_it(module, dynamic=True, **settings)
    assert_equal(compiled(first), module(first))
    (dispatcher,) = set(dispatchers()) - known
    return compiled, dispatcher


@torch.no_grad()
def test_rows_that_depend_on_one_another_are_never_padded(caplog: pytest.LogCaptureFixture) -> None:
    module = MeanOverImages()
    compiled, dispatcher = compiled_with_dispatcher(module, images(5), token_budgets=[4, 8])
    for count in (3, 8, 2):
        batch = images(count)
        assert_equal(compiled(batch), module(batch))
    # Eight images fill a budget, so that nothing is padded.
    assert (dispatcher.hits, dispatcher.misses) == (1, {fx.MissReason.PADDING_UNPROVED: 3})
    assert dispatcher.num_captured == 1
    (warning,) = [record.getMessage() for record in caplog.records if "never padded" in record.getMessage()]
    assert "amax: amax reduces over tokens" in warning
    assert "in forward: return y - y.amax(0)" in warning


@torch.no_grad()
def test_what_may_not_be_padded_is_captured_where_its_size_repeats() -> None:
    module = MeanOverImages()
    compiled, dispatcher = compiled_with_dispatcher(module, images(5), token_budgets=[4, 8])
    for count in (3, 5, 3, 5, 3):
        batch = images(count)
        assert_equal(compiled(batch), module(batch))
    assert (dispatcher.hits, dispatcher.misses) == (4, {fx.MissReason.PADDING_UNPROVED: 2})
    assert dispatcher.num_captured == 2


@torch.no_grad()
def test_warm_up_captures_the_size_of_what_may_not_be_padded() -> None:
    module = MeanOverImages()
    compiled, dispatcher = compiled_with_dispatcher(module, images(5), token_budgets=[4, 8])
    assert fx.warmup(compiled, torch.zeros_like(images(3))) == 1
    assert dispatcher.num_captured == 1
    batch = images(3)
    assert_equal(compiled(batch), module(batch))
    assert dispatcher.hits == 1


@torch.no_grad()
@pytest.mark.parametrize("make", [SortsColumns, MeanOverImages])
def test_what_is_not_proved_is_not_padded(make: Callable[[], nn.Module]) -> None:
    module = make()
    compiled, dispatcher = compiled_with_dispatcher(module, images(5), token_budgets=[8])
    for count in (3, 7):
        batch = images(count)
        assert_equal(compiled(batch), module(batch))
    assert (dispatcher.hits, dispatcher.misses) == (0, {fx.MissReason.PADDING_UNPROVED: 3})


@torch.no_grad()
def test_the_number_of_segments_is_exact_where_the_code_reads_it() -> None:
    class MeanOfLengths(nn.Module):
        def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
            q = x.view(-1, 2, 4)
            y = torch.ops.fxsplit.varlen_attention(q, q, q, cu_seqlens, x.shape[0], 0.5).view(-1, 8)
            return y * cu_seqlens.diff().float().mean()

    module = MeanOfLengths()
    known = set(dispatchers())
    compiled = compile_it(module, dynamic=True, mode="exact", exact_min_hits=1)
    for ends in ([5, 12], [3, 7, 12], [4, 12], [2, 6, 12], [6, 12], [1, 3, 7, 9, 12]):
        x, cu_seqlens = torch.randn(12, 8), torch.tensor([0, *ends], dtype=torch.int32)
        assert_equal(compiled(x, cu_seqlens), module(x, cu_seqlens))
    made = set(dispatchers()) - known
    assert not any(dispatcher.program.padding.segments_may_grow for dispatcher in made)
    assert sum(dispatcher.hits for dispatcher in made) == 6
    assert sum(dispatcher.num_captured for dispatcher in made) == 3


@torch.no_grad()
def test_a_budget_that_the_trace_does_not_hold_for_is_dropped() -> None:
    class ByLength(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clip = ClipLike()

        def forward(self, x: Tensor) -> Tensor:
            return self.clip(x) * (2 if x.shape[0] > 6 else 3)

    module = ByLength()
    compiled, dispatcher = compiled_with_dispatcher(module, images(5), token_budgets=[6, 16])
    for count in (3, 6, 4):
        batch = images(count)
        assert_equal(compiled(batch), module(batch))
    assert (dispatcher.hits, dispatcher.misses) == (4, {})
    (ladder,) = [program.ladder for program in dispatcher.programs.values()]
    with pytest.raises(fx.CaptureError, match="the trace does not hold for 16 tokens"):
        ladder._request(16)
    batch = images(9)
    assert_equal(compiled(batch), module(batch))


class AddsNoise(ClipLike):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + torch.rand(16)


class AttendsOverRepeatedRows(nn.Module):
    """The rows of attention are four times those of the input that counts."""

    def forward(self, x: Tensor, quarter: Tensor, cu_seqlens: Tensor) -> Tensor:
        q = (x + quarter.repeat_interleave(4, 0)).view(-1, 2, 4)
        return torch.ops.fxsplit.varlen_attention(q, q, q, cu_seqlens, q.shape[0], 0.5).view(-1, 8)


def repeated_rows() -> tuple[Tensor, ...]:
    return torch.randn(16, 8), torch.randn(4, 8), torch.tensor([0, 4, 16], dtype=torch.int32)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["auto", pytest.param("exact", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("module", "make_inputs", "why"),
    [
        (AddsNoise(), lambda: (images(4),), "draws random numbers"),
        (AttendsOverRepeatedRows(), repeated_rows, "which are not the"),
    ],
    ids=["random numbers", "other rows"],
)
def test_some_graphs_are_never_captured(
    module: nn.Module, make_inputs: Callable[[], Any], why: str, mode: str
) -> None:
    known = set(dispatchers())
    compiled = compile_it(module, dynamic=True, token_budgets=[4], mode=mode, exact_min_hits=1)
    for _ in range(3):
        inputs = make_inputs()
        torch.manual_seed(0)
        expected = module(*inputs)
        torch.manual_seed(0)
        assert_equal(compiled(*inputs), expected)
    (dispatcher,) = set(dispatchers()) - known
    assert why in dispatcher.program.padding.capture_refusal
    assert dispatcher.misses == {fx.MissReason.UNSUPPORTED_GRAPH: 3}


@pytest.mark.parametrize("declared", [True, False])
@torch.no_grad()
def test_a_tower_of_tiles_is_padded_without_proof_only_where_it_declares_that(declared: bool) -> None:
    spec = fx.DenseTowerSpec((3, 8, 8), tokens_per_image=4, hidden_size=16, output=lambda result: result)
    tower = fx.wrap(MeanOverImages(), spec)
    tower.declares_padding = declared
    known = set(dispatchers())
    batch = images(5)
    result = compile_it(tower, token_budgets=[32])(batch)
    (dispatcher,) = set(dispatchers()) - known
    assert not dispatcher.program.padding.proved
    if declared:  # and is taken at its word, wrongly
        assert (dispatcher.hits, dispatcher.misses) == (1, {})
    else:
        assert (dispatcher.hits, dispatcher.misses) == (0, {fx.MissReason.PADDING_UNPROVED: 1})
        assert_equal(result, tower.call(batch))


@torch.no_grad()
def test_sizes_beside_the_token_count_select_their_own_captures() -> None:
    class Tokens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x) * 2

    module = Tokens()
    known = set(dispatchers())
    compiled = compile_it(module, dynamic=True, token_budgets=[4])
    for shape in ((3, 2, 5, 8), (4, 2, 7, 8), (2, 2, 5, 8), (2, 2, 7, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), module(x))
    made = set(dispatchers()) - known
    assert sum(d.num_captured for d in made) == 2
    assert sum(d.hits for d in made) == 4


def test_a_dispatcher_is_forgotten_with_its_module() -> None:
    import gc

    known = set(dispatchers())
    module = ClipLike().requires_grad_(False)
    compiled = compile_it(module)
    compiled(images(3))
    made: list[BudgetDispatcher] = list(set(dispatchers()) - known)
    assert len(made) == 1
    made.clear()
    del compiled, module
    torch._dynamo.reset()
    gc.collect()
    assert not set(dispatchers()) - known


def compile_exactly(module: nn.Module, min_hits: int) -> tuple[Any, BudgetDispatcher]:
    """A copy of the module in mode `exact`, traced with five images; and its dispatcher."""
    known = set(dispatchers())
    compiled = compile_it(copy.deepcopy(module), dynamic=True, mode="exact", exact_min_hits=min_hits)
    compiled(images(5))
    (dispatcher,) = set(dispatchers()) - known
    return compiled, dispatcher


@torch.no_grad()
def test_exact_mode_captures_the_counts_that_come_and_pads_nothing() -> None:
    module = ClipLike().requires_grad_(False)
    compiled, dispatcher = compile_exactly(module, 2)
    for count in (4, 5, 4, 5, 4, 6):
        batch = images(count)
        assert_equal(compiled(batch), module(batch))
    assert dispatcher.hits == 4  # the second 4, both 5 after the one that was traced, the third 4
    assert dispatcher.misses == {fx.MissReason.NEW_SHAPE: 3}
    assert dispatcher.num_captured == 2
    dispatcher.clear()
    assert dispatcher.num_captured == 0


@torch.no_grad()
def test_exact_mode_serves_rows_that_depend_on_one_another() -> None:
    class LessMean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clip = ClipLike()

        def forward(self, x: Tensor) -> Tensor:
            y = self.clip(x)
            return y - y.mean(0)

    module = LessMean().requires_grad_(False)
    compiled, dispatcher = compile_exactly(module, 1)
    for count in (4, 5, 4):
        batch = images(count)
        assert_equal(compiled(batch), module(batch))
    assert not dispatcher.program.padding.proved
    assert (dispatcher.hits, dict(dispatcher.misses)) == (4, {})


def test_captures_for_other_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x) * 2

    monkeypatch.setattr(dispatch, "_MOST_PROGRAMS", 2)
    module = Tokens()
    known = set(dispatchers())
    compiled = compile_it(module, dynamic=True, token_budgets=[4])
    for length in (5, 6, 7, 8, 9, 5):
        x = torch.randn(3, 2, length, 8)
        torch.testing.assert_close(compiled(x), module(x))
    assert all(d.num_captured <= 2 for d in set(dispatchers()) - known)
