"""What stands around a call and sees, or changes, the single operations and modules inside it."""

from __future__ import annotations

from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch._C import _len_torch_function_stack as num_function_modes
from torch._C._functorch import maybe_current_level as transform_level
from torch.nn.modules import module as _modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

# Both are written to in place, and never replaced.
_BEFORE, _AFTER = _modules._global_forward_pre_hooks, _modules._global_forward_hooks


def foreign_around() -> str | None:
    """What would not see the operations of a replay; None: nothing. Takes a quarter of a microsecond."""
    if _BEFORE or _AFTER:
        return "hooks for all modules"
    if transform_level() is not None:
        return "a transform of torch.func"
    if num_dispatch_modes():
        return "a TorchDispatchMode"
    # `torch.set_default_device` is one too, which changes no more than where tensors are made.
    if num_function_modes():
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if any(type(mode) is not DeviceContext for mode in modes):
            return "a TorchFunctionMode"
    return None
