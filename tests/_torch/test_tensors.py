"""Copies of modules on the same parameters, and modules with another's names."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.tensors import linked_copy, share_names


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.shared = self.inner[0]
        self.scale = nn.Parameter(torch.ones(1))
        self.depth = 2
        object.__setattr__(self, "unregistered", self.inner[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale  # type: ignore[no-any-return]


def test_a_linked_copy_has_the_parameters_wherever_they_are() -> None:
    tree = Tree().eval()
    twin: Any = linked_copy(tree)
    x = torch.randn(3, 2)
    for change in (
        lambda: tree.scale.data.mul_(2),
        lambda: setattr(tree, "scale", nn.Parameter(torch.full((1,), 3.0))),
        lambda: tree.double(),
        lambda: tree.load_state_dict(Tree().double().state_dict(), assign=True),
        lambda: twin.inner[1].running_mean.add_(1),
    ):
        change()
        y = x.to(tree.scale.dtype)
        assert torch.equal(twin(y), tree(y))
        assert twin.scale is tree.scale


def test_a_linked_copy_has_modules_attributes_and_hooks_of_its_own() -> None:
    tree = Tree()
    tree.inner[0].forward = lambda x: x
    seen: list[int] = []
    tree.inner.register_forward_hook(lambda *args: seen.append(0))
    twin: Any = linked_copy(tree)
    assert twin.shared is twin.inner[0] is not tree.inner[0]
    assert twin.unregistered is twin.inner[1]
    assert "forward" not in vars(twin.inner[0])
    twin.depth = 3
    twin.inner[0] = nn.Identity()
    twin.inner.register_forward_hook(lambda *args: seen.append(1))
    twin.eval()
    assert tree.depth == 2
    assert isinstance(tree.inner[0], nn.Linear)
    assert tree.training
    twin(torch.randn(3, 2))
    assert seen == [0, 1]
    tree(torch.randn(3, 2))
    assert seen == [0, 1, 0]


class Wrapper(nn.Module):
    def __init__(self, tree: Tree) -> None:
        super().__init__()
        object.__setattr__(self, "tree", tree)
        share_names(self, tree)


def test_a_module_may_have_the_names_of_another() -> None:
    tree = Tree()
    state = {name: tensor.clone() for name, tensor in tree.state_dict().items()}
    wrapper: Any = Wrapper(tree)
    assert list(wrapper.state_dict()) == list(state)
    wrapper.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert not tree.scale.any()
    wrapper.inner = nn.Identity()
    assert isinstance(tree.inner, nn.Identity)
    wrapper.double()
    assert tree.scale.dtype == torch.float64
    copied = copy.deepcopy(wrapper)
    copied.scale.data.fill_(7)
    assert copied.tree.scale.item() == 7
    assert not tree.scale.any()
