"""Modules that nobody wrapped: whatever Dynamo hands over, the results are eager's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.backend import BudgetDispatcher, dispatch

from .towers import compile_it

Made = Callable[[], list[BudgetDispatcher]]

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def assert_equal(got: Tensor, expected: Tensor) -> None:
    """Strides too."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, check_stride=True)


class ClipLike(nn.Module):
    """Dense attention over a batch of images. (A first batch of 3 would be traced as the channel count.)"""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 4, 16))
        self.before, self.after = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 3 * 16), nn.Linear(16, 16)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.after(x + self.out(attended.transpose(1, 2).flatten(2))).mean(1)


def images(count: int) -> Tensor:
    """Their count alone is dynamic: a trace of dynamic heights and widths takes three times as long."""
    return dynamic(torch.randn(count, 3, 8, 8))


def dynamic(x: Tensor, *dims: int) -> Tensor:
    for dim in dims or (0,):
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


class WithMlp(ClipLike):
    """With a hidden width of 120, which may be padded to 128."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 120), nn.Linear(120, 16)

    def forward(self, images: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(super().forward(images))))


@pytest.mark.parametrize(("mode", "num_derived"), [(torch.no_grad, 3), (torch.inference_mode, 0)])
def test_only_parameters_with_versions_are_kept_in_another_form(
    mode: Any, num_derived: int, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    with mode():
        module = WithMlp().eval()
        compiled = compile_it(module, token_budgets=[4], passes=["pad_mlp_width"])
        for scale in (1.0, 0.5):
            for parameter in module.parameters():
                parameter.mul_(scale)
            x = images(2)
            assert_equal(compiled(x), module(x))
    (dispatcher,) = made()
    assert len(dispatcher.program.derived.recipes) == num_derived
    assert ("torch.no_grad()" in caplog.text) is (num_derived == 0)


@pytest.fixture
@torch.no_grad()
def clip(made: Made) -> Any:
    torch.manual_seed(1)
    module = ClipLike().requires_grad_(False)
    compiled = compile_it(module, token_budgets=[2, 4, 8], debug=True)
    compiled(images(5))
    (dispatcher,) = made()
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
@pytest.mark.parametrize(
    "stored",
    [lambda x: x.to(memory_format=torch.channels_last), lambda x: x.repeat(2, 1, 1, 1)[::2]],
    ids=["channels last", "every second image"],
)
def test_inputs_in_other_strides_are_padded_to_a_budget(
    stored: Callable[[Tensor], Tensor], made: Made
) -> None:
    """Inductor's pieces refuse inputs in other strides than those of the trace."""
    module = ClipLike().requires_grad_(False)
    compiled = compile_it(module, token_budgets=[4], piece_compiler="inductor", mode="full")
    for count in (2, 3, 4, 3):
        x = dynamic(stored(images(count)))
        torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=1e-5)
    assert [each.hits for each in made()] == [4]


@pytest.mark.parametrize(
    ("settings_", "reason"),
    [
        ({"enabled": False}, fx.MissReason.DISABLED),
        ({"mode": "none"}, fx.MissReason.DISABLED),
        ({"token_budgets": [2]}, fx.MissReason.OVER_LARGEST_BUDGET),
        ({"token_budgets": [8], "max_graph_bytes": 1}, fx.MissReason.NOT_CAPTURED),
    ],
)
@torch.no_grad()
def test_every_miss_has_its_reason(made: Made, settings_: dict[str, Any], reason: fx.MissReason) -> None:
    module = ClipLike()
    compiled = compile_it(module, **settings_)
    x = images(5)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), module(x))
    (dispatcher,) = made()
    assert (dispatcher.hits, dispatcher.misses) == (0, {reason: 2})


class MeanOverImages(ClipLike):
    def forward(self, images: Tensor) -> Tensor:
        y = super().forward(images)
        return y - y.amax(0)


def compiled_with_dispatcher(made: Made, module: nn.Module, **settings: Any) -> tuple[Any, Any]:
    """The compiled module, traced by a first call of five images, and its dispatcher."""
    compiled = compile_it(module, **settings)
    assert_equal_batches(compiled, module, (5,))
    (dispatcher,) = made()
    return compiled, dispatcher


def assert_equal_batches(compiled: Any, module: nn.Module, counts: Iterable[int]) -> None:
    for count in counts:
        batch = images(count)
        assert_equal(compiled(batch), module(batch))


@torch.no_grad()
def test_rows_that_depend_on_one_another_are_never_padded_and_captured_where_their_size_repeats(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    module = MeanOverImages()
    compiled, dispatcher = compiled_with_dispatcher(made, module, token_budgets=[4, 8])
    assert_equal_batches(compiled, module, (3, 8, 2))
    # Eight images fill a budget, so that nothing is padded.
    assert (dispatcher.hits, dispatcher.misses) == (1, {fx.MissReason.PADDING_UNPROVED: 3})
    assert_equal_batches(compiled, module, (5, 3, 5, 3))
    assert (dispatcher.hits, dispatcher.misses) == (5, {fx.MissReason.PADDING_UNPROVED: 3})
    assert dispatcher.num_captured == 3
    (warning,) = [record.getMessage() for record in caplog.records if "never padded" in record.getMessage()]
    assert "amax: amax reduces over tokens" in warning
    assert "in forward: return y - y.amax(0)" in warning


@torch.no_grad()
def test_the_number_of_segments_is_exact_where_the_code_reads_it(made: Made) -> None:
    class MeanOfLengths(nn.Module):
        def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
            q = x.view(-1, 2, 4)
            y = torch.ops.fxsplit.varlen_attention(q, q, q, cu_seqlens, x.shape[0], 0.5).view(-1, 8)
            return y * cu_seqlens.diff().float().mean()

    module = MeanOfLengths()
    compiled = compile_it(module, mode="exact", exact_min_hits=1)
    for ends in ([5, 12], [3, 7, 12], [4, 12], [2, 6, 12], [6, 12], [1, 3, 7, 9, 12]):
        x, cu_seqlens = dynamic(torch.randn(12, 8)), dynamic(torch.tensor([0, *ends], dtype=torch.int32))
        assert_equal(compiled(x, cu_seqlens), module(x, cu_seqlens))
    assert not any(dispatcher.program.padding.segments_may_grow for dispatcher in made())
    assert sum(dispatcher.hits for dispatcher in made()) == 6
    assert sum(dispatcher.num_captured for dispatcher in made()) == 3


@torch.no_grad()
def test_a_budget_that_the_trace_does_not_hold_for_is_dropped(made: Made) -> None:
    class ByLength(ClipLike):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * (2 if images.shape[0] > 6 else 3)

    module = ByLength()
    compiled, dispatcher = compiled_with_dispatcher(made, module, token_budgets=[6, 16])
    assert_equal_batches(compiled, module, (3, 6, 4))
    assert (dispatcher.hits, dispatcher.misses) == (4, {})
    (ladder,) = [program.ladder for program in dispatcher.programs.values()]
    with pytest.raises(fx.CaptureError, match="the trace does not hold for 16 tokens"):
        ladder.request(16)
    assert_equal_batches(compiled, module, (9,))


class AttendsOverRepeatedRows(nn.Module):
    """The rows of attention are four times those of the input that counts."""

    def forward(self, x: Tensor, quarter: Tensor, cu_seqlens: Tensor) -> Tensor:
        q = (x + quarter.repeat_interleave(4, 0)).view(-1, 2, 4)
        return torch.ops.fxsplit.varlen_attention(q, q, q, cu_seqlens, q.shape[0], 0.5).view(-1, 8)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_attention_over_other_rows_than_tokens_is_captured_at_all_sizes(made: Made, mode: str) -> None:
    module = AttendsOverRepeatedRows()
    compiled = compile_it(module, mode=mode, debug=True)
    for ends in ([4, 16], [2, 16], [1, 8, 16], [4, 16], [3, 9, 16]):
        rows_of_both = torch.randn(16, 8), torch.randn(4, 8)
        inputs = tuple(map(dynamic, (*rows_of_both, torch.tensor([0, *ends], dtype=torch.int32))))
        assert_equal(compiled(*inputs), module(*inputs))
    (dispatcher,) = made()
    assert "which are not the" in dispatcher.program.padding.other_rows
    assert (dispatcher.hits, dispatcher.misses) == (3, {fx.MissReason.NEW_SHAPE: 2})
    assert dispatcher.num_captured == 2


@torch.no_grad()
def test_a_tower_of_tiles_that_declares_padding_is_taken_at_its_word(made: Made) -> None:
    spec = fx.DenseTowerSpec((3, 8, 8), tokens_per_image=4, hidden_size=16, output=lambda result: result)
    tower = fx.wrap(MeanOverImages(), spec)
    tower.declares_padding = True
    compile_it(tower, token_budgets=[32])(images(5))
    (dispatcher,) = made()
    assert not dispatcher.program.padding.proved
    assert (dispatcher.hits, dispatcher.misses) == (1, {})


class WritesToAView(ClipLike):
    dim = 0

    def forward(self, images: Tensor) -> Tensor:
        features = torch.stack([super().forward(images)] * 2, self.dim)
        half = features[..., :8]
        torch._dynamo.graph_break()
        half.mul_(2)
        return features


@torch.no_grad()
@pytest.mark.parametrize("dim", [0, 1])
def test_outputs_that_share_memory_still_do_after_a_replay(dim: int) -> None:
    module = WritesToAView()
    module.dim = dim
    compiled = compile_it(module, token_budgets=[8])
    assert_equal_batches(compiled, module, (5, 3, 8, 3))
    assert fx.stats(compiled).hits >= 2


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x) * 2


@torch.no_grad()
def test_sizes_beside_the_token_count_select_their_own_captures(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile_it(Tokens(), token_budgets=[4])

    def assert_served(*shapes: tuple[int, ...]) -> None:
        for shape in shapes:
            x = dynamic(torch.randn(shape), 0, 2)
            torch.testing.assert_close(compiled(x), Tokens()(x))

    assert_served((3, 2, 5, 8), (4, 2, 7, 8), (2, 2, 5, 8), (2, 2, 7, 8))
    assert sum(d.num_captured for d in made()) == 2
    assert sum(d.hits for d in made()) == 4
    monkeypatch.setattr(dispatch, "_MOST_PROGRAMS", 2)
    assert_served(*((3, 2, length, 8) for length in (6, 7, 8, 9, 6)))
    assert all(d.num_captured <= 2 for d in made())


def test_a_dispatcher_is_forgotten_with_its_module(made: Made) -> None:
    module = ClipLike().requires_grad_(False)
    compiled = compile_it(module)
    compiled(images(3))
    assert len(made()) == 1
    del compiled, module
    torch._dynamo.reset()
    gc.collect()
    assert not made()


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "min_hits", "hits", "misses"),
    [
        (ClipLike, 2, 4, {fx.MissReason.NEW_SHAPE: 3}),  # the second 4, both 5, the third 4
        (MeanOverImages, 1, 7, {}),
    ],
)
def test_exact_mode_captures_the_counts_that_come_and_pads_nothing(
    made: Made, make: Callable[[], nn.Module], min_hits: int, hits: int, misses: dict[fx.MissReason, int]
) -> None:
    module = make()
    compiled, dispatcher = compiled_with_dispatcher(made, module, mode="exact", exact_min_hits=min_hits)
    assert_equal_batches(compiled, module, (4, 5, 4, 5, 4, 6))
    assert dispatcher.program.padding.proved == (make is ClipLike)
    assert (dispatcher.hits, dispatcher.misses) == (hits, misses)
    assert dispatcher.num_captured == (2 if misses else 3)
    dispatcher.clear()
    assert dispatcher.num_captured == 0
