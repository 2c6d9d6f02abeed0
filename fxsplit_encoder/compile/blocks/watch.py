"""Whether blocks are what they were when the graph was made that has them inside.

Dynamo sees an op in the place of a block, so none of its guards tells that a layer in a block has been
replaced, has a hook or another forward now, or is in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat
from operator import getitem, itemgetter
from typing import Any

from torch import nn

from fxsplit_encoder._torch.modules import Held
from fxsplit_encoder._torch.tensors import children_of, forward_hooks_of

_IN_TRAINING = itemgetter("training")

_ALIKE_IN_TRAINING = (
    *(nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Conv2d, nn.Conv3d, nn.Embedding),
    *(nn.GELU, nn.SiLU, nn.ReLU, nn.Identity, nn.ModuleList, nn.Sequential),
)
"""Modules of just these classes compute the same in training: two thirds of a tower's."""


class BlockWatch:
    """Blocks as they are now, and whether they still are.

    What is looked at: which modules there are and of which classes, in which modules of the tower they lie,
    their hooks, whether they are in training, and a forward of their own; not the values of their other
    attributes, but those of the tower's configuration, from which they come.

    Args:
        blocks: with the tower that each is part of.
    """

    def __init__(self, blocks: Mapping[nn.Module, nn.Module]) -> None:
        self._modules = list(dict.fromkeys(module for block in blocks for module in block.modules()))
        self._classes = list(map(type, self._modules))
        self._attributes = list(map(vars, self._modules))
        towers = list(dict.fromkeys(blocks.values()))
        # Their attributes of this name, which is how modules of transformers have one.
        self._configured = [(vars(tower), vars(tower).get("config")) for tower in towers]
        configurations = [vars(found) for _, found in self._configured if hasattr(found, "__dict__")]
        around = _around(self._modules, towers)
        dictionaries = [*map(children_of, [*around, *self._modules]), *configurations]
        self._held = Held(held for held in dictionaries if held)
        hooks = [held for module in self._modules for held in forward_hooks_of(module)]
        # To ask empty dictionaries whether they are empty takes a third of the time of counting.
        self._without_hooks = [held for held in hooks if not held]
        self._with_hooks = [held for held in hooks if held]
        self._own_forwards = [own for own in self._attributes if "forward" in own]
        self._modal = [vars(module) for module in self._modules if type(module) not in _ALIKE_IN_TRAINING]
        self._training = self._modes() if any(self._modes()) else None
        self._facts = self._take()

    def _modes(self) -> list[bool]:
        return list(map(_IN_TRAINING, self._modal))

    def _take(self) -> tuple[Any, ...]:
        return (
            # A forward of its own is one attribute more.
            sum(map(len, self._attributes)),
            list(map(tuple, self._with_hooks)),
            list(map(getitem, self._own_forwards, repeat("forward"))),
        )

    def are_unchanged(self) -> bool:
        """Whether they are the blocks that they were. About 60 nanoseconds a module."""
        if any(self._without_hooks) or not self._held.is_same():
            return False
        if any(own.get("config") is not found for own, found in self._configured):
            return False
        if self._training is None:
            if any(map(_IN_TRAINING, self._modal)):
                return False
        elif self._modes() != self._training:
            return False
        try:
            return list(map(type, self._modules)) == self._classes and self._take() == self._facts
        except KeyError:
            return False


def _around(inside: Iterable[nn.Module], towers: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules of towers that have some of these inside."""
    known = set(inside)
    others = (module for tower in towers for module in tower.modules() if module not in known)
    return [module for module in others if not known.isdisjoint(module.modules())]
