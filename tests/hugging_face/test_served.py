"""A tower through any sequence of what may happen to it, beside one that nobody accelerated."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import nn

import fxsplit_encoder as fx

from .comparisons import assert_close, assert_same_bits
from .models import TOWER
from .tiny_model import randomize


def tower() -> Any:
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER)).eval()
    randomize(model)
    return model


class Lifecycle(RuleBasedStateMachine):
    """Captures are switched off, so that nothing is traced: whatever is rebuilt is rebuilt all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = tower()
        self.model = fx.accelerate(copy.deepcopy(self.reference), {"enabled": False})

    def both(self) -> tuple[Any, Any]:
        return self.model, self.reference

    @rule(count=st.integers(1, 3), hidden=st.booleans())
    def encode(self, count: int, hidden: bool) -> None:
        pixels = torch.randn(count, 3, 16, 16, dtype=self.reference.dtype)
        with torch.no_grad():
            got, expected = (each(pixels, output_hidden_states=hidden) for each in self.both())
        assert_close(got, expected)

    @rule(mode=st.booleans())
    def train(self, mode: bool) -> None:
        for each in self.both():
            each.train(mode)

    @rule(dtype=st.sampled_from([torch.float32, torch.float64]))
    def cast(self, dtype: torch.dtype) -> None:
        for each in self.both():
            each.to(dtype)

    @rule(factor=st.sampled_from([0.5, 1.0]), assign=st.booleans())
    def load(self, factor: float, assign: bool) -> None:
        state = {name: tensor * factor for name, tensor in self.reference.state_dict().items()}
        for each in self.both():
            each.load_state_dict(copy.deepcopy(state), assign=assign)

    @rule(block=st.integers(0, 1))
    def replace(self, block: int) -> None:
        linear = nn.Linear(32, 48, dtype=self.reference.dtype)
        for each in self.both():
            each.encoder.layers[block].mlp.fc1 = copy.deepcopy(linear)

    @rule(block=st.integers(0, 1))
    def hook(self, block: int) -> None:
        for each in self.both():
            layer = each.encoder.layers[block].mlp
            layer.register_forward_hook(lambda module, args, output: output * 0.5)

    @rule()
    def unhook(self) -> None:
        for each in self.both():
            for layer in each.encoder.layers:
                layer.mlp._forward_hooks.clear()  # a handle is that of a module, not of its copy

    @rule(budget=st.sampled_from([0, 34]))
    def accelerate(self, budget: int) -> None:
        settings: dict[str, Any] = {"enabled": False, "token_budgets": [budget] if budget else []}
        assert fx.accelerate(self.model, settings) is self.model

    @rule()
    def restore(self) -> None:
        fx.restore(self.model)

    @rule()
    def copy(self) -> None:
        self.model, kept = copy.deepcopy(self.model), self.model
        fx.restore(kept)

    @invariant()
    def the_parameters_are_the_models_own(self) -> None:
        assert_same_bits(self.model.state_dict(), self.reference.state_dict())


Lifecycle.TestCase.settings = settings(max_examples=12, stateful_step_count=12, derandomize=True)
TestLifecycle = Lifecycle.TestCase
