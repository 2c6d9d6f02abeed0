"""What a tower is made of, and whether it still is.

Captures and programs are made of a tower's modules as they are at one moment. Whoever puts an adapter layer,
a hook or another forward into it later expects that to be run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from fxsplit_encoder._torch.modules import PLACE, Held
from fxsplit_encoder._torch.tensors import children_of, forward_hooks_of
from fxsplit_encoder._torch.transformers import collects_outputs, device_hook

_FORWARD = "forward"
_ALIGNS = "AlignDevicesHook"


class Structure:
    """The modules of a tower as they are now: which there are, of which classes, with which hooks and which
    forwards of their own. Hooks by which transformers collects outputs count as none: it installs them when
    somebody first asks for hidden states.

    Args:
        tower: the outermost module.
        is_around: whether hooks and the forward of the outermost module run around its captures, and so may
            change.
    """

    def __init__(self, tower: nn.Module, *, is_around: bool = False) -> None:
        self._tower = tower
        self._is_around = is_around
        self._take()

    def _take(self) -> None:
        self._names = [name for name, _ in self._tower.named_modules()]
        modules = list(self._tower.modules())
        self._modules = modules
        self._classes = list(map(type, modules))
        self._children = Held([children_of(module) for module in modules])
        inner = modules[1:] if self._is_around else modules
        hooks = [held for module in inner for held in forward_hooks_of(module)]
        # To ask empty dictionaries whether they are empty takes a third of the time of counting.
        self._without_hooks = [held for held in hooks if not held]
        self._with_hooks = Held([held for held in hooks if held])
        self._attributes = list(map(vars, inner))
        self._num_attributes = self._count_attributes()
        self._own_forwards = [own for own in self._attributes if _FORWARD in own]
        self._forwards = self._current_forwards()
        self._additions = dict(self._find_additions())

    def _count_attributes(self) -> int:
        return sum(map(len, self._attributes))

    def _current_forwards(self) -> list[Any]:
        return [own.get(_FORWARD) for own in self._own_forwards]

    def is_unchanged(self) -> bool:
        """Whether the modules are what they were. About 60 nanoseconds a module."""
        if not self._children.is_same() or list(map(type, self._modules)) != self._classes:
            return False
        # A forward of its own is one attribute more.
        is_same = self._count_attributes() == self._num_attributes and not any(self._without_hooks)
        if is_same and self._with_hooks.is_same() and self._current_forwards() == self._forwards:
            return True
        return self._is_equal()

    def _is_equal(self) -> bool:
        """The same, told by looking at every hook and forward: those that count as none come and go."""
        before = self._additions
        if dict(self._find_additions()) != before:
            return False
        self._take()
        return True

    @property
    def additions(self) -> Collection[tuple[str, str]]:
        """The modules, by their names, that have a "hook" or a "forward" beside what their classes have."""
        return self._additions.keys()

    def change(self) -> str:
        """What has changed, in a few words; empty: nothing."""
        if self.is_unchanged():
            return ""
        now = dict(self._tower.named_modules())
        before = dict(zip(self._names, zip(self._modules, self._classes, strict=True), strict=True))
        for name in dict.fromkeys((*before, *now)):
            module, kind = before.get(name, (None, type(None)))
            found = now.get(name)
            if found is not module or type(found) is not kind:
                return f"{name or 'the tower'}: a {kind.__name__}, and now another {type(found).__name__}"
        additions = dict(self._find_additions())
        for name, what in (*self._additions, *additions):
            if self._additions.get((name, what)) != additions.get((name, what)):
                return f"{name or 'the tower'}: another {what} than before"
        return "modules in another order than before"

    def _find_additions(self) -> Iterator[tuple[tuple[str, str], list[Any]]]:
        """With the hooks or the forward."""
        for name, module in self._tower.named_modules():
            if module is self._tower and self._is_around:
                continue
            hooks = [hook for held in forward_hooks_of(module) for hook in held.values()]
            if hooks := [hook for hook in hooks if not collects_outputs(hook)]:
                yield (name, "hook"), hooks
            if _FORWARD in vars(module) and not _is_plain_forward(module):
                yield (name, _FORWARD), [vars(module)[_FORWARD]]


def _is_plain_forward(module: nn.Module) -> bool:
    """Whether the forward that a module got for itself is its class's all the same: accelerate's, which moves
    inputs to the device of weights that stay there, or what is left of a trace of ours.
    """
    hook = device_hook(module)
    if hook is not None:
        return type(hook).__name__ == _ALIGNS and not hook.offload
    return hasattr(module, PLACE)
