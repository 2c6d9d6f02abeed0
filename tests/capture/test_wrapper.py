from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fxsplit_encoder._torch.dispatch import tree_flatten
from fxsplit_encoder.capture.breakable import BreakableCUDAGraphCapture, eager_break_during_capture
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.capture.wrapper import BreakableCUDAGraphWrapper, describe
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.kernels.attention.hugging_face import use_varlen_attention

from . import wrapper_checks as shared

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("check", shared.CHECKS, ids=lambda check: check.__name__)
def test_on_the_cpu(check: Callable[[str], None]) -> None:
    check("cpu")


# --- descriptors


def descriptor(*args: Any, device: torch.device = CPU, **kwargs: Any) -> Any:
    return describe(*tree_flatten((args, kwargs)), device)


leaves = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3))


@given(
    st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner), max_leaves=5)
)
def test_equal_arguments_have_equal_descriptors(value: Any) -> None:
    x = torch.zeros(2, 3)
    assert descriptor(x, value) == descriptor(x + 1, value)
    assert hash(descriptor(x, value)) == hash(descriptor(x, value))
    assert descriptor(x, value) != descriptor(x, [value])


def test_what_a_graph_bakes_in_tells_captures_apart() -> None:
    x = torch.zeros(4, 4)
    different = [
        descriptor(x),
        descriptor(torch.zeros(4, 8)[:, ::2]),
        descriptor(x[:3]),
        descriptor(x.double()),
        descriptor(x, 1),
        descriptor(x, 1.0),
        descriptor(x, True),
        descriptor(x, None),
        descriptor(x, flag=1),
        descriptor([x]),
        descriptor((x,)),
        descriptor({"a": x}),
    ]
    for number, one in enumerate(different):
        assert all(one != other for other in different[:number])


def test_values_on_the_host_count_for_a_module_on_a_gpu() -> None:
    grid = torch.tensor([[1, 4, 6]])
    assert descriptor(grid, device=CUDA) == descriptor(grid.clone(), device=CUDA)
    assert descriptor(grid, device=CUDA) != descriptor(grid + 1, device=CUDA)
    assert descriptor(grid) == descriptor(grid + 1)
    nan = torch.tensor(float("nan"), dtype=torch.bfloat16)
    assert descriptor(nan, device=CUDA) == descriptor(nan.clone(), device=CUDA)
    conjugate = torch.zeros(4096, dtype=torch.complex64).conj()
    assert descriptor(conjugate, device=CUDA) == descriptor(conjugate.clone(), device=CUDA)
    for other in (torch.zeros(4097), torch.zeros(3, device="meta")):
        with pytest.raises(InputError, match=rf"on {other.device} for a module on cuda .* at most 4096"):
            descriptor(other, device=CUDA)


# --- what runs eagerly


@torch.no_grad()
def test_numbers_and_structures_are_told_apart_and_returned() -> None:
    module = shared.Scaled().eval()
    wrapper, x = BreakableCUDAGraphWrapper(module), torch.randn(2, 4)
    for factor in (2.0, 3.0, 2.0):
        got = wrapper(x, factor=factor)
        torch.testing.assert_close(got["y"], module(x, factor)["y"])
        assert (got["factor"], got["none"]) == (factor, None)
    assert (wrapper.captures, wrapper.hits) == (2, 3)
    wrapper(x, options={1})
    assert list(wrapper.misses.values()) == [1]
    assert "an argument of type set is not hashable" in next(iter(wrapper.misses))


def test_training_and_gradients_run_eagerly() -> None:
    module, x = shared.Scaled(), torch.randn(2, 4)
    wrapper = BreakableCUDAGraphWrapper(module)
    wrapper(x)["y"].sum().backward()
    assert module.linear.weight.grad is not None
    wrapper.eval()
    assert wrapper(x)["y"].requires_grad
    module.requires_grad_(False)
    assert not wrapper(x)["y"].requires_grad
    assert wrapper(x.requires_grad_())["y"].requires_grad
    with torch.no_grad():
        wrapper(x)
    assert wrapper.misses == {"training": 1, "gradients": 2}
    assert wrapper.hits == 2


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[0].add_(1)
        return x * 2


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


@torch.no_grad()
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Writes(), "the module writes to an argument"),
        (Function(lambda x: (x, object())), "the module returned a object"),
    ],
)
def test_what_a_replay_could_not_repeat_runs_eagerly(module: nn.Module, reason: str) -> None:
    wrapper, x = BreakableCUDAGraphWrapper(module.eval()), torch.ones(2)
    for _ in range(2):
        wrapper(x)
    ((found, count),) = wrapper.misses.items()
    assert reason in found
    assert count == 2
    if isinstance(module, Writes):
        assert x.tolist() == [3.0, 1.0]


class Sparse(nn.Module):
    """Multiplies by a buffer without strides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.matrix, x)


def nested(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x[:1], x]).to_padded_tensor(0.0)


def is_positive(x: Tensor) -> bool:
    return bool((x > 0).all())


torch.library.define("wrapper_test::is_positive", "(Tensor x) -> bool")
torch.library.impl("wrapper_test::is_positive", "CPU", is_positive)

UNSTRIDED: dict[str, nn.Module] = {
    "nested": Function(nested),
    "sparse": Function(lambda x: x.to_sparse() @ x),
    "held": Sparse(),
    "returned by a break": Function(lambda x: eager_break_during_capture(Tensor.to_sparse)(x).to_dense()),
    "branch of torch": Function(lambda x: x * 2 if torch.is_nonzero(x[0, 0] > 0) else x),
    "branch of a library": Function(lambda x: x * 2 if torch.ops.wrapper_test.is_positive(x) else x),
}


@torch.no_grad()
@pytest.mark.parametrize("name", UNSTRIDED)
def test_values_without_strides_and_branches_on_values_run_eagerly(name: str) -> None:
    module = UNSTRIDED[name].eval()
    wrapper = BreakableCUDAGraphWrapper(module)
    for x in (torch.ones(2, 2), -torch.eye(2)):
        torch.testing.assert_close(wrapper(x), module(x))
    assert wrapper.hits == 0 and list(wrapper.misses.values()) == [2]
    to_dense = BreakableCUDAGraphWrapper(Function(Tensor.to_dense).eval())  # an argument without strides
    assert torch.equal(to_dense(x.to_sparse()), x)
    assert "sparse_coo" in next(iter(to_dense.misses))


@torch.no_grad()
def test_a_module_that_has_changed_is_captured_again(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    wrapper, x = BreakableCUDAGraphWrapper(module), torch.randn(4, 8)

    def replace_layer() -> None:
        module[0] = nn.Linear(8, 8)

    def transpose_in_place() -> None:
        module[0].weight.data = module[0].weight.data.t()

    changes: list[Callable[[], object]] = [
        replace_layer,
        transpose_in_place,
        lambda: module.register_forward_hook(lambda module, inputs, output: output + 1),
    ]
    wrapper(x)
    for number, change in enumerate(changes):
        before = wrapper(x)
        change()
        after = wrapper(x)
        assert torch.equal(after, module(x)) and not torch.allclose(after, before)
        assert wrapper.captures == number + 2
    assert len(caplog.messages) == len(changes)
    assert "since the capture: 0: a Linear, and now another Linear" in caplog.messages[0]


def test_inside_a_capture_it_is_the_module_and_one_capture_is_kept_at_least() -> None:
    with pytest.raises(InputError, match="max_captures: expected at least 1, got 0"):
        BreakableCUDAGraphWrapper(nn.Identity(), max_captures=0)

    module, x = shared.Scaled().eval(), torch.randn(2, 4)
    wrapper = BreakableCUDAGraphWrapper(module)
    with BreakableCUDAGraphCapture(GraphPool(CPU)) as capture:
        y = wrapper(x)["y"] + 1
    x.normal_()
    capture.replay()
    torch.testing.assert_close(y, module(x)["y"] + 1)
    assert (wrapper.hits, wrapper.captures, sum(wrapper.misses.values())) == (0, 0, 0)


# --- an untouched Hugging Face tower


@torch.no_grad()
def test_a_hugging_face_tower_that_nobody_wrapped(
    make_tower: Any, tiny_towers: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = shared.captures_made(monkeypatch)
    tower = make_tower()
    use_varlen_attention(tower)
    wrapper = BreakableCUDAGraphWrapper(tower)
    batches = [[(1, 4, 6), (1, 8, 8)], [(1, 8, 8), (1, 6, 4)], [(1, 8, 12)], [(2, 4, 4), (1, 4, 6)]]
    for grids in batches:
        inputs = make_batch(grids)
        metadata = tiny_towers.wrapped.host_metadata(grids)
        arguments = {"grid_thw": None, **metadata, "max_seqlen": 64}
        got = wrapper(inputs["pixel_values"], **arguments)
        expected = tower(inputs["pixel_values"], **arguments)
        assert type(got) is type(expected)
        torch.testing.assert_close(got.pooler_output, expected.pooler_output, rtol=0, atol=1e-6)
        torch.testing.assert_close(got.deepstack_features, expected.deepstack_features, rtol=0, atol=1e-6)
        reference = tiny_towers.reference(inputs["pixel_values"], inputs["image_grid_thw"])
        torch.testing.assert_close(got.pooler_output, reference.pooler_output, rtol=0, atol=1e-5)
    assert not wrapper.misses
    assert wrapper.hits == 4
    assert wrapper.captures == 3  # the first two differ in their values only
    assert [capture.num_eager_breaks for capture in made] == [len(tower.blocks)] * 3
