from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fxsplit_encoder.capture.buffers import SharedBuffers, StaticBuffer, copy_results
from fxsplit_encoder.capture.inputs import StaticInputs
from fxsplit_encoder.capture.parameters import StaticParameters
from fxsplit_encoder.errors import ReplayError


@given(st.lists(st.integers(0, 12), max_size=12), st.sampled_from([0, 1]))
def test_any_sequence_of_loads_leaves_the_last_value_and_zeros(sizes: list[int], dim: int) -> None:
    buffer = StaticBuffer("x", torch.full((12, 12), 7.0), dim)
    for number, rows in enumerate(sizes, start=1):
        shape = [12, 12]
        shape[dim] = rows
        buffer.load(torch.full(shape, float(number)))
        assert buffer.tensor.narrow(dim, 0, rows).eq(number).all()
        assert buffer.tensor.narrow(dim, rows, 12 - rows).eq(0).all()
    assert buffer.capacity == 12


def test_a_buffer_without_a_token_dimension_is_replaced_whole() -> None:
    buffer = StaticBuffer("x", torch.zeros(3), None)
    buffer.load(torch.ones(3))
    assert buffer.tensor.tolist() == [1.0] * 3
    with pytest.raises(ReplayError, match=r"x: got a value of shape \(2,\) for a captured buffer of \(3,\)"):
        buffer.check(torch.ones(2))
    scalar = StaticBuffer("s", torch.zeros(()), 0)
    scalar.load(torch.tensor(4.0))
    assert (scalar.tensor.item(), scalar.capacity) == (4.0, 1)


def pad_planes(buffer: torch.Tensor, value: torch.Tensor) -> None:
    buffer.fill_(-1)
    buffer[tuple(slice(size) for size in value.shape)].copy_(value)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=4))
def test_a_padding_logic_pads_along_any_dimension(shapes: list[tuple[int, ...]]) -> None:
    static = StaticInputs([StaticBuffer("x", torch.full((3, 4, 2), 7.0), 0, pad_planes)])
    for number, shape in enumerate(shapes, start=1):
        static.load({"x": torch.full(shape, float(number))})
        expected = torch.full((3, 4, 2), -1.0)
        pad_planes(expected, torch.full(shape, float(number)))
        assert torch.equal(static.tensors["x"], expected)
        if shape != (3, 4, 2):
            with pytest.raises(ReplayError, match="may be padded"):
                static.check_full({"x": torch.zeros(shape)})


@pytest.mark.parametrize("shape", [(4, 4, 2), (3, 5, 2), (1, 1, 3), (3, 4), (3, 4, 2, 1)])
@pytest.mark.parametrize(
    ("logic", "message"), [(None, ""), (pad_planes, r".* \(3, 4, 2\); no dimension may be larger")]
)
def test_what_does_not_fit_is_refused(logic: Any, message: str, shape: tuple[int, ...]) -> None:
    buffer = StaticBuffer("x", torch.zeros(3, 4, 2), 0, logic)
    with pytest.raises(ReplayError, match=f"x: got a value of shape{message}"):
        buffer.check(torch.zeros(shape))


@pytest.mark.parametrize("logic", [None, pad_planes])
def test_a_number_fills_a_whole_buffer(logic: Any) -> None:
    static = StaticInputs([StaticBuffer("x", torch.zeros(4, 3), 0, logic)])
    static.load({"x": torch.tensor(5.0)})
    static.check_full({"x": torch.tensor(5.0)})
    assert static.tensors["x"].eq(5).all()
    static.load({"x": torch.ones(2, 3)})
    assert static.tensors["x"][:2].eq(1).all()
    assert static.tensors["x"][2:].eq(0 if logic is None else -1).all()


@pytest.mark.parametrize("order", [[2, 0, 1], [0, 0, 1, 1], [], [0, 1, 3], [0, -1]])
def test_an_order_is_taken_among_its_own_rows_alone(order: list[int]) -> None:
    buffer = StaticBuffer("order", torch.arange(4), is_permutation=True)
    value = torch.tensor(order, dtype=torch.int64)
    StaticBuffer("order", torch.arange(4)).check(value)
    if all(0 <= entry < len(order) for entry in order):
        buffer.check(value)
        buffer.load(value)
        assert buffer.tensor.tolist() == [*order, *[0] * (4 - len(order))]
    else:
        with pytest.raises(ReplayError, match=f"order: got an order of {len(order)} rows with entries from"):
            buffer.check(value)


def test_memory_does_not_wait_for_the_garbage_collector() -> None:
    shared = SharedBuffers()
    buffers = [shared.share(StaticBuffer("x", torch.zeros(rows))) for rows in (4, 2)]
    for buffer in buffers:
        buffer.load(torch.ones(1))
    memory = [weakref.ref(buffer) for buffer in buffers]
    gc.disable()
    try:
        shared.clear()
        del buffer, buffers
        assert [reference() for reference in memory] == [None, None]
    finally:
        gc.enable()


def test_parameters_without_a_module_are_watched_themselves() -> None:
    tensors = [torch.zeros(2), torch.zeros(3)]
    parameters = StaticParameters(tensors)
    parameters.check_addresses()
    tensors[1].set_(torch.zeros(3))
    with pytest.raises(ReplayError, match=r"constant 1 of shape \(3,\): moved"):
        parameters.check_addresses()
    assert parameters.current() == tensors


def test_buffers_and_removed_parameters_count() -> None:
    module = nn.BatchNorm1d(3)
    parameters = StaticParameters.of_module(module)
    parameters.check_addresses()
    assert parameters.memory() is parameters.memory()
    module.running_mean = torch.ones(3)
    module.bias = None
    with pytest.raises(
        ReplayError, match=r"^capture rule 6: bias, running_mean: moved since the capture \(2 of 5 "
    ):
        parameters.check_addresses()
    del module.weight
    assert parameters.current()[:2] == [None, None]


def test_tied_parameters_and_constants_beside_a_module_are_told_apart() -> None:
    module = nn.Linear(2, 2)
    constant = torch.zeros(5)
    parameters = StaticParameters([module.weight, constant, module.weight.detach()], module)
    module.weight = nn.Parameter(torch.ones(2, 2))
    assert parameters.current()[0] is parameters.current()[2] is module.weight
    assert parameters.current()[1] is constant
    assert parameters.have_moved()


def test_another_parameter_over_the_same_memory_has_not_moved() -> None:
    module = nn.Linear(2, 2)
    parameters = StaticParameters.of_module(module)
    module.weight = nn.Parameter(module.weight.data)
    assert not parameters.have_moved()
    module.weight.data = module.weight.data.clone()
    assert parameters.have_moved()


def test_a_constant_may_be_left_out_until_it_is_filled_and_after_it_was_tried() -> None:
    static = StaticInputs([StaticBuffer("a", torch.ones(4), may_be_left_out=True)])
    with static.kept_constants():
        static.load({"a": torch.full((2,), 5.0)})
        assert static.tensors["a"].tolist() == [5.0, 5.0, 0.0, 0.0]
    static.load({})
    assert static.tensors["a"].tolist() == [1.0] * 4
    static.load({"a": torch.full((2,), 3.0)})
    with pytest.raises(ReplayError, match="a: the replay needs this buffer"):
        static.load({})
    static.load({"a": None})
    assert static.tensors["a"].tolist() == [3.0, 3.0, 0.0, 0.0]


# --- results


@pytest.mark.parametrize(
    "make",
    [
        lambda values: values.clone(),
        lambda values: values.clone().t(),
        lambda values: values[:, :1].clone().expand(3, 4),
        lambda values: values[:1, :1].clone().expand(3, 4),
        lambda values: values[:, :1].clone().expand(2, 3, 1),
    ],
    ids=["whole", "transposed", "one column", "one number", "one dimension more"],
)
def test_results_of_a_repeated_call_go_to_where_those_of_the_first_are(
    make: Callable[[Tensor], Tensor],
) -> None:
    first, second = torch.rand(3, 4), torch.rand(3, 4)
    kept, expected = make(first), make(second)
    place = kept.data_ptr()
    copy_results([kept, None, (kept,)], [make(second), None, (make(second),)])
    assert torch.equal(kept, expected) and kept.data_ptr() == place
