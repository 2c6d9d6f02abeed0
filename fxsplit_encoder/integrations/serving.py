"""Warm up, refresh and count an accelerated model, a manager, or a module that `torch.compile` returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxsplit_encoder import backend
from fxsplit_encoder._torch.dynamo import is_compiled
from fxsplit_encoder.backend.dispatch import refresh_compiled, stats_of_compiled
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.hugging_face import ServedTower, capturing_at_once, served_towers_of
from fxsplit_encoder.manager import EncoderCudaGraphManager
from fxsplit_encoder.messages import shown
from fxsplit_encoder.runtime.statistics import ManagerStats


def stats(target: Any) -> ManagerStats:
    """Hits, misses by reason, padding and memory so far.

    Args:
        target: a model after `accelerate`, whose towers are counted together; what
            `torch.compile(..., backend="encoder_cg")` returned, of which each call is an item; or a manager.

    Raises:
        InputError: it is none of these.
    """
    if isinstance(target, EncoderCudaGraphManager):
        return target.stats()
    served = _served(target)
    if served:
        parts = [tower.stats() for tower in served]
        many = len(parts) > 1
        return ManagerStats.total(
            [part.under(tower.name) if many else part for part, tower in zip(parts, served, strict=True)]
        )
    if is_compiled(target):
        return stats_of_compiled(target)
    raise _nothing_that_serves("stats", target)


def warmup(target: Any, *args: Any, **kwargs: Any) -> int:
    """Compiles and captures now rather than at the first request.

    Args:
        target: a model after `accelerate`; what `torch.compile(..., backend="encoder_cg")` returned; or a
            manager.
        args, kwargs: example inputs. For a model they are those of a call of it, and whatever its towers are
            given is captured; without any, what their configuration is for. For a compiled module that is
            no wrapped tower there have to be some.

    Returns:
        How many captures there are now.

    Raises:
        InputError: without example inputs for a module that cannot make them.
    """
    if isinstance(target, EncoderCudaGraphManager):
        target.capture()
    elif served := _served(target):
        if args or kwargs:
            with torch.no_grad(), capturing_at_once():
                target(*args, **kwargs)
        else:
            for tower in served:
                tower.warm()
    else:
        return backend.warmup(target, *args, **kwargs)
    return sum(1 for captured in stats(target).budgets.values() if captured.mode)


def refresh(target: Any) -> None:
    """Has the next call compute anew whatever is kept of parameters: weights in another form (padded, merged,
    quantized) and tables of positions; and look whether parameters have moved. To be called after they were
    written to through `parameter.data`, which PyTorch gives no version. Without it a GPU's first call after
    such a write may use the old ones, and a write that changes no sampled element is not seen.

    Args:
        target: a model or tower after `accelerate`; what `torch.compile(..., backend="encoder_cg")` returned;
            or a manager.

    Raises:
        InputError: it is none of these.
    """
    if isinstance(target, EncoderCudaGraphManager):
        target.check_weights()
    elif served := _served(target):
        for tower in served:
            tower.refresh()
    elif is_compiled(target):
        refresh_compiled(target)
    else:
        raise _nothing_that_serves("refresh", target)


def _nothing_that_serves(function: str, target: Any) -> InputError:
    return InputError(
        f"{function}: expected a model after accelerate(), a manager, or what torch.compile(..., "
        f"backend='encoder_cg') returned; got {shown(type(target).__name__)}"
    )


def _served(target: Any) -> list[ServedTower]:
    return [served for _, served in served_towers_of(target)] if isinstance(target, nn.Module) else []
