"""Outputs of which some fields are computed once they are used."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutputWithPooling, ModelOutput

from fxsplit_encoder.hugging_face.outputs import Lazy, LazyTuple, make_output

LAST, POOLED, STATE = torch.ones(2, 3), torch.full((2,), 5.0), torch.full((2, 3), 2.0)
NAMES = ["last_hidden_state", "pooler_output", "hidden_states"]


class Computed:
    """How often something was computed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, value: Any) -> Lazy:
        def compute() -> Any:
            self.names.append(name)
            return value

        return Lazy(compute)


@pytest.fixture
def computed() -> Computed:
    return Computed()


@pytest.fixture
def output(computed: Computed) -> Any:
    states = LazyTuple((STATE, computed("state", STATE), None))
    values = {"last_hidden_state": computed("last", LAST), "pooler_output": POOLED, "hidden_states": states}
    return make_output(BaseModelOutputWithPooling, values)


@pytest.mark.parametrize("times", [0, 2])
def test_names_fields_that_are_there_and_moves_compute_nothing(
    times: int, output: Any, computed: Computed
) -> None:
    for _ in range(times):
        output = send_to_device(output, "cpu")
    assert isinstance(output, BaseModelOutputWithPooling)
    assert list(output) == list(output.keys()) == NAMES
    assert len(output) == 3 and "last_hidden_state" in output and "attentions" not in output
    assert output.get("attentions") is None and output.attentions is None
    assert torch.equal(output[1], POOLED) and torch.equal(output.to_tuple()[1:2][0], POOLED)
    assert torch.equal(output.hidden_states[0], STATE) and output.hidden_states[2] is None
    assert computed.names == []
    assert torch.equal(output.last_hidden_state, LAST) and torch.equal(output[0], LAST)
    assert torch.equal(output.hidden_states[1], STATE)
    assert computed.names == ["last", "state"]


READERS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda output: output.last_hidden_state,
    "key": lambda output: output["last_hidden_state"],
    "get": lambda output: output.get("last_hidden_state"),
    "index": lambda output: output[0],
    "slice": lambda output: output[:2][0],
    "tuple": lambda output: output.to_tuple()[0],
    "value": lambda output: next(iter(output.values())),
    "unpacked": lambda output: next(iter(output.to_tuple())),
    "leaf": lambda output: tree_leaves(output)[0],
    "sum of tuples": lambda output: operator.add((POOLED,), operator.add(output[:1], (POOLED,)))[1],
    "sent": lambda output: send_to_device(output, "cpu").last_hidden_state,
    "another class": lambda output: ModelOutput(output.items())[0],
    "copy": lambda output: output.copy().last_hidden_state,
    "mapping": lambda output: type(output)({**output}).last_hidden_state,
    "deep copy": lambda output: copy.deepcopy(output).last_hidden_state,
    "pickle": lambda output: pickle.loads(pickle.dumps(output)).last_hidden_state,
    "pickle of a copy": lambda output: pickle.loads(pickle.dumps(dict(output)))["last_hidden_state"],
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_used_is_computed(reader: str, output: Any, computed: Computed) -> None:
    got = READERS[reader](output)
    assert type(got) is torch.Tensor
    assert torch.equal(got, LAST)
    assert computed.names[0] == "last"


def test_torchs_functions_take_a_tuple_of_states(output: Any) -> None:
    states = output.hidden_states[:2]
    assert torch.equal(torch.cat(states), torch.cat([STATE, STATE]))


def test_a_pickle_is_the_towers_own_class(output: Any) -> None:
    unpickled = pickle.loads(pickle.dumps(output))
    assert type(unpickled) is BaseModelOutputWithPooling
    assert type(unpickled.hidden_states) is tuple


def test_what_is_set_is_not_computed(output: Any, computed: Computed) -> None:
    output.last_hidden_state = POOLED
    output["hidden_states"] = (LAST,)
    output["attentions"] = (STATE,)
    assert output.to_tuple() == (POOLED, POOLED, (LAST,), (STATE,))
    assert list(output) == [*NAMES, "attentions"]
    assert computed.names == []


def test_an_output_that_is_whole_is_the_towers_own_class(computed: Computed) -> None:
    whole = make_output(BaseModelOutputWithPooling, {"last_hidden_state": LAST})
    assert type(whole) is BaseModelOutputWithPooling
    values = {"hidden_states": (STATE,), "pooler_output": computed("pooled", POOLED)}
    assert list(make_output(BaseModelOutputWithPooling, values)) == [*values]
