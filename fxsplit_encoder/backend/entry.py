"""The entry of torch.compile, and warming it up."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxsplit_encoder._torch.dynamo import original_module
from fxsplit_encoder._torch.dynamo_errors import RestartAnalysis, TraceAgain
from fxsplit_encoder.backend.dispatch import BudgetDispatcher, SharedGraph, capturing_all
from fxsplit_encoder.compile.blocks import LiveWeights, end_blocks, takes_blocks
from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.compile.program import Program
from fxsplit_encoder.compile.trace import compile_graph
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import CompileError, ConfigError, InputError

logger = logging.getLogger(__name__)

# What decides how items are packed into batches, and on which path and GPU they run.
_MANAGERS_SETTINGS = ("packing", "paths", "data_parallel", "max_frames_per_batch", "start_file")


@takes_blocks
def encoder_cg(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Returns the backend: `torch.compile(module, backend="encoder_cg", options={"config": "encoder.yaml"})`.

    Args:
        options: the keys of `EncoderConfig`, and `config`, a YAML file or a mapping that the other keys
            override.
        mode: torch.compile's own modes, which do not apply here.

    Raises:
        ConfigError: an unknown option or a bad value.
    """
    with contextlib.ExitStack() as at_end:
        at_end.callback(end_blocks)
        if mode is not None:
            raise ConfigError(
                f"mode: torch.compile's modes do not apply to encoder_cg; got {mode!r}; pass "
                "options={'mode': ...} with one of EncoderConfig's modes"
            )
        config = EncoderConfig.from_options(options or {})
        check_applies(config)
        compile_options = CompileOptions.of(config)
        if torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
        ):
            if config.invariant:
                raise ConfigError(
                    "invariant: a call with gradients enabled runs the module's own code, whose bits depend "
                    "on the batch; call under torch.no_grad() or torch.inference_mode()"
                )
            warn_once(
                "encoder_cg: called with gradients enabled, so it runs eagerly, without compiled pieces or "
                "CUDA graphs; call under torch.no_grad() or torch.inference_mode()"
            )
            return module.forward
        if config.mode == "breakable":
            compile_options = replace(compile_options, piece_compiler="eager")

        def dispatcher(program: Program, weights: LiveWeights) -> Callable[[Sequence[Any]], list[Any]]:
            first = BudgetDispatcher(program, config, weights)
            # Weights of blocks are looked up in one tower.
            return first if weights or not program.static_inputs else SharedGraph(first)

        try:
            return compile_graph(module, example_inputs, compile_options, dispatcher)
        except (ConfigError, RestartAnalysis):
            raise  # the second is how AOT asks Dynamo to trace again
        except Exception as error:  # what Dynamo hands over must give eager's results, whatever fails here
            warn_once(f"encoder_cg: a graph runs eagerly because {_why_eager(config.invariant, error)}")
        return module.forward


def _why_eager(invariant: bool, error: Exception) -> str:
    """Returns a sentence on why a graph did not compile, where it may run eagerly; else raises."""
    if end_blocks(refused=True):  # equal blocks were traced once, which may be at fault
        logger.warning("equal blocks are traced one by one, which takes longer: %s", error)
        raise TraceAgain(restart_reason="equal blocks are traced one by one")
    if invariant:
        raise ConfigError(
            f"invariant: a graph does not compile, and run eagerly its bits depend on the batch: {error}"
        ) from error
    if isinstance(error, CompileError):
        return f"it cannot be split: {error}"
    logger.exception("compiling a graph failed")
    return f"compiling it failed: {type(error).__name__}: {error}"


def check_applies(config: EncoderConfig) -> None:
    """Raises ConfigError for settings of batches: here the caller makes the batches."""
    defaults = EncoderConfig()
    problems = [
        f"{name}: does not apply behind torch.compile, where a call is one batch; got "
        f"{getattr(config, name)!r}; leave it out, or give it to EncoderCudaGraphManager"
        for name in _MANAGERS_SETTINGS
        if getattr(config, name) != getattr(defaults, name)
    ]
    if not config.compile:
        problems.append(
            "compile: torch.compile has traced the module already; got False; leave it out, or set mode: "
            "breakable, which runs the graph's operations one by one"
        )
    if problems:
        raise ConfigError(*problems)


def warmup(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Compiles a module that uses this backend and captures its whole ladder of budgets, largest first. The
    call itself is not in the statistics.

    Args:
        compiled: what `torch.compile(..., backend="encoder_cg")` returned.
        args, kwargs: example inputs; for a wrapped tower they may be left out.

    Returns:
        How many captures the module has now.

    Raises:
        InputError: without example inputs for a module that cannot make them.
    """
    if not args and not kwargs:
        module = original_module(compiled)
        if not hasattr(module, "example_inputs"):
            raise InputError(
                f"warmup: {type(module).__name__} makes no example inputs; pass some: "
                "warmup(compiled, *inputs)"
            )
        args = module.example_inputs()
    with torch.no_grad(), capturing_all() as called:
        compiled(*args, **kwargs)
    return sum(dispatcher.num_captured for dispatcher in called)


@functools.cache
def warn_once(message: str) -> None:
    """Warns of each message once a process."""
    warnings.warn(message, stacklevel=2)
