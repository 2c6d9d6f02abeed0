"""Outputs of which some fields are computed once they are used."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.utils import convert_to_fp32, find_device, send_to_device
from torch.utils._pytree import tree_leaves, tree_map
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

        return Lazy(value.new_empty(0), compute)


@pytest.fixture
def computed() -> Computed:
    return Computed()


@pytest.fixture
def output(computed: Computed) -> Any:
    states = LazyTuple((STATE, computed("state", STATE), None))
    values = {"last_hidden_state": computed("last", LAST), "pooler_output": POOLED, "hidden_states": states}
    return make_output(BaseModelOutputWithPooling, values)


WALKS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda output: output,
    "sent": lambda output: send_to_device(output, "cpu"),
    "sent twice": lambda output: send_to_device(send_to_device(output, "cpu"), "cpu"),
    "cast": convert_to_fp32,
    "mapping": lambda output: type(output)({name: value for name, value in output.items()}),
    "keywords": lambda output: type(output)(**{name: value for name, value in output.items()}),
    "pairs": lambda output: type(output)((name, value) for name, value in output.items()),
    "unpacked": lambda output: type(output)(**output),
    "by its names": lambda output: type(output)(**{name: output[name] for name in output}),
    "copy": lambda output: output.copy(),
    "tree": lambda output: tree_map(lambda value: value if value is None else value.to("cpu"), output),
}


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_computes_nothing_and_what_it_makes_is_read_as_the_output(
    walk: str, output: Any, computed: Computed
) -> None:
    assert list(output) == list(output.keys()) == NAMES
    assert len(output) == len(output.values()) == len(dict(output)) == len({**output}) == 3
    assert "last_hidden_state" in output and "attentions" not in output
    assert output.get("attentions") is None
    assert find_device(output) == torch.device("cpu")
    made = WALKS[walk](output)
    assert isinstance(made, BaseModelOutputWithPooling)
    assert all(isinstance(value, torch.Tensor | tuple) for value in made.values())
    assert torch.equal(made[1], POOLED) and torch.equal(made.pooler_output, POOLED)
    assert made.attentions is None and made.hidden_states[2] is None
    assert torch.equal(made.hidden_states[0], STATE)
    assert computed.names == []
    assert torch.equal(made.last_hidden_state, LAST)
    assert torch.equal(made["last_hidden_state"], LAST) and torch.equal(made[0], LAST)
    assert type(made["last_hidden_state"]) is torch.Tensor
    assert torch.equal(made.hidden_states[1], STATE)
    assert computed.names == ["last", "state"]


def test_another_class_that_is_made_of_it_has_its_fields_in_their_places(output: Any) -> None:
    made = ModelOutput({name: send_to_device(value, "cpu") for name, value in output.items()})
    assert torch.equal(made[0], LAST) and torch.equal(made[1], POOLED)


READERS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda output: output.last_hidden_state,
    "key": lambda output: output["last_hidden_state"],
    "get": lambda output: output.get("last_hidden_state"),
    "index": lambda output: output[0],
    "slice": lambda output: output[:2][0],
    "tuple": lambda output: output.to_tuple()[0],
    "value": lambda output: next(iter(output.values())) + 0,
    "leaf": lambda output: torch.cat([tree_leaves(output)[0][:1], LAST[1:]]),
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


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "operator": lambda tensor: 1 - tensor @ STATE.T,
    "comparison": lambda tensor: (tensor == LAST).all(),
    "function": lambda tensor: torch.nn.functional.linear(tensor, STATE),
    "list": lambda tensor: torch.stack([STATE, tensor]),
    "method": lambda tensor: tensor.sum(dim=1).unsqueeze(0),
    "item": lambda tensor: tensor[:, None],
    "numpy": lambda tensor: torch.from_numpy(tensor.numpy()),
    "rows": lambda tensor: torch.stack(list(tensor)),
    "shape": lambda tensor: torch.tensor([*tensor.shape, len(tensor), tensor.dim()]),
    "cast": lambda tensor: tensor.double().half().float(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_value_of_a_walk_is_used_like_the_tensor(operation: str, output: Any) -> None:
    value = dict(output)["last_hidden_state"]
    assert torch.equal(OPERATIONS[operation](value), OPERATIONS[operation](LAST))


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
