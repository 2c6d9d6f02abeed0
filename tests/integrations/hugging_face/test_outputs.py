"""Outputs of which some fields are computed once they are read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutputWithPooling

from fxsplit_encoder.integrations.hugging_face.outputs import HiddenStates, make_output

LAST, POOLED, OTHER = torch.ones(1), torch.zeros(2), torch.full((2,), 5.0)
STATES = (torch.ones(3), torch.zeros(3), torch.full((3,), 2.0))


class Computed:
    """A tower's own output, and how often it was computed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Any:
        self.count += 1
        return BaseModelOutputWithPooling(last_hidden_state=LAST, pooler_output=POOLED, hidden_states=STATES)


@pytest.fixture
def computed() -> Computed:
    return Computed()


@pytest.fixture
def output(computed: Computed) -> Any:
    return make_output(
        BaseModelOutputWithPooling, {"pooler_output": OTHER}, ["last_hidden_state", "hidden_states"], computed
    )


def test_what_is_there_is_read_without_the_tower(output: Any, computed: Computed) -> None:
    assert isinstance(output, BaseModelOutputWithPooling)
    assert type(output).__name__ == "BaseModelOutputWithPooling"
    assert output.pooler_output is output["pooler_output"] is OTHER
    assert output.attentions is None
    output.pooler_output = (POOLED,)
    assert output.pooler_output == (POOLED,)
    assert computed.count == 0


READERS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda output: output.last_hidden_state,
    "key": lambda output: output["hidden_states"],
    "index": lambda output: output[0],
    "slice": lambda output: output[:2],
    "tuple": lambda output: output.to_tuple(),
    "length": len,
    "iteration": list,
    "keys": lambda output: output.keys(),
    "values": lambda output: output.values(),
    "items": lambda output: output.items(),
    "get": lambda output: output.get("last_hidden_state"),
    "membership": lambda output: "last_hidden_state" in output,
    "dictionary": dict,
    "unpacking": lambda output: {**output},
    "text": repr,
    "deep copy": copy.deepcopy,
    "pickle": lambda output: pickle.loads(pickle.dumps(output)),
    "tree": tree_leaves,
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_looks_at_more_has_it_computed_once(reader: str, output: Any, computed: Computed) -> None:
    READERS[reader](output)
    assert computed.count == 1
    assert list(output) == ["last_hidden_state", "pooler_output", "hidden_states"]
    assert output.last_hidden_state is output[0] is LAST
    assert output.pooler_output is OTHER
    assert output.hidden_states is STATES
    assert computed.count == 1


def test_a_pickle_is_the_towers_own_class(output: Any) -> None:
    assert type(pickle.loads(pickle.dumps(output))) is BaseModelOutputWithPooling


def test_what_is_set_is_not_computed(output: Any, computed: Computed) -> None:
    output.last_hidden_state = POOLED
    output["hidden_states"] = (LAST,)
    assert output.to_tuple() == (OTHER, POOLED, (LAST,))
    assert computed.count == 0


def test_fields_come_in_the_order_of_the_tower_and_then_those_that_were_set(computed: Computed) -> None:
    output = make_output(BaseModelOutputWithPooling, {"last_hidden_state": LAST}, ["hidden_states"], computed)
    output["attentions"] = (LAST,)
    assert list(output) == ["last_hidden_state", "hidden_states", "attentions"]


def test_an_output_that_is_whole_is_the_towers_own_class(computed: Computed) -> None:
    output = make_output(BaseModelOutputWithPooling, {"last_hidden_state": LAST}, [], computed)
    assert type(output) is BaseModelOutputWithPooling


def test_hidden_states_that_are_there_are_read_without_the_others(computed: Computed) -> None:
    states = HiddenStates({1: OTHER}, 3, lambda: computed().hidden_states)
    assert states[1] is states[-2] is OTHER
    assert len(states) == 3
    assert computed.count == 0
    assert states[-1] is STATES[2]
    assert tuple(states) == STATES
    assert states[:2] == STATES[:2]
    with pytest.raises(IndexError):
        states[3]
    with pytest.raises(IndexError):
        states[-4]
    assert computed.count == 1


def test_a_tuple_has_all_hidden_states(computed: Computed) -> None:
    states = HiddenStates({1: OTHER}, 3, lambda: computed().hidden_states)
    made = {"pooler_output": OTHER, "last_hidden_state": LAST, "hidden_states": states}
    output = make_output(BaseModelOutputWithPooling, made, [], computed)
    assert output.hidden_states is states
    assert output.to_tuple() == (LAST, OTHER, STATES)
