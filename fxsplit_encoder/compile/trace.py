"""Traces a Python forward, or takes a graph from Dynamo, and builds its `Program`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxsplit_encoder._torch.aot import boxed, static_inputs, to_aten
from fxsplit_encoder._torch.device import no_default_device
from fxsplit_encoder._torch.dynamo import inner_error, maybe_mark_dynamic, traced_files
from fxsplit_encoder._torch.dynamo_errors import TorchDynamoException
from fxsplit_encoder.compile import blocks
from fxsplit_encoder.compile.blocks import BlockError, LiveWeights, equal_blocks_as_ops, inline_blocks
from fxsplit_encoder.compile.build import build_program
from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.compile.passes import expected_width
from fxsplit_encoder.compile.pieces import compile_inductor, piece_compiler
from fxsplit_encoder.compile.program import BoundProgram, Program, bind
from fxsplit_encoder.errors import CompileError, FxSplitError, UntraceableError
from fxsplit_encoder.kernels import compile_jobs
from fxsplit_encoder.kernels.attention import ahead

logger = logging.getLogger(__name__)
_trace_numbers = itertools.count()

_UNVERSIONED = (
    "parameters are inference tensors, whose changes leave no version, so none is kept in another form "
    "(padded, merged), which costs speed: load the model under torch.no_grad(), not inference_mode()"
)


@no_default_device()
def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: CompileOptions,
    make_runtime: Callable[[Program, LiveWeights], Callable[[Sequence[Any]], list[Any]]],
) -> Callable[..., Any]:
    """Builds the program of a graph from Dynamo, and returns the function that Dynamo calls.

    AOT removes aliasing and mutation around the program. `make_runtime` returns a function of the program's
    inputs without the last, the current weights of blocks.
    """

    def compile_inference(aten_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        given = static_inputs()
        num_inputs = len(aten_module.graph.find_nodes(op="placeholder"))
        weights = inline_blocks(aten_module)
        static = [*given, *range(num_inputs, num_inputs + len(weights))]
        known = [value for value in example_inputs if isinstance(value, nn.Parameter)]
        has_versions = not any(weight.is_inference() for weight in (*known, *weights.current()))
        if not has_versions:
            logger.warning(_UNVERSIONED)
        program = build_program(aten_module, static, options, may_derive=has_versions)
        runtime = make_runtime(program, weights)
        weights.watch()

        @boxed
        def call(args: list[Any]) -> list[Any]:
            values = [*args]
            args.clear()
            return runtime(values)

        return call

    with _workers(options, example_inputs):
        return to_aten(module, example_inputs, compile_inference)


@contextlib.contextmanager
def _workers(options: CompileOptions, inputs: Iterable[Any]) -> Iterator[None]:
    """Compiles pieces and attention kernels in other processes while the graph is traced."""
    if options.is_known:
        yield
        return
    device = next((value.device for value in inputs if isinstance(value, torch.Tensor)), torch.device("cpu"))
    ahead.warm_up(device)  # first: to start Inductor's workers, this process imports Inductor
    if piece_compiler(options.piece_compiler, device) is compile_inductor:
        from fxsplit_encoder._torch import inductor

        inductor.start_workers()
    try:
        with ahead.compiling_as_traced(device, lambda width: expected_width(width, options.passes, device)):
            yield
    finally:
        compile_jobs.dismiss()


_OF_TRACING = (FxSplitError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@no_default_device()
def trace_forward(
    forward: Callable[[dict[str, Tensor]], Tensor],
    inputs: Mapping[str, Tensor],
    dynamic_dims: Mapping[str, Sequence[int]],
    options: CompileOptions,
    module: nn.Module | None = None,
) -> BoundProgram:
    """Traces `forward(inputs)` once, for every size of the dimensions named, and builds its program.

    Args:
        forward: from a dictionary of tensors to one tensor.
        inputs: example tensors, with contents that the forward can run on.
        dynamic_dims: per input, the dimensions whose sizes vary.
        module: the module that the forward calls; its equal blocks are traced once.

    Raises:
        UntraceableError: Dynamo cannot trace the forward as one graph.
        CompileError: the graph cannot be split, or has no token count where `options` require one.
    """
    with _workers(options, inputs.values()):
        if module is not None:
            try:
                with equal_blocks_as_ops(module) as num_blocks:
                    if num_blocks:
                        return _trace(forward, inputs, dynamic_dims, options)
            except _OF_TRACING as error:
                if not _blames_blocks(error):
                    raise
                logger.warning("equal blocks are traced one by one, which takes longer: %s", error)
        return _trace(forward, inputs, dynamic_dims, options)


def _blames_blocks(error: Exception) -> bool:
    """Whether to trace again without blocks as ops after this error."""
    if isinstance(error, UntraceableError):
        files = traced_files(error.__cause__) if error.__cause__ is not None else []
        return not files or blocks.__file__ in files
    return isinstance(error, BlockError) or not isinstance(error, FxSplitError)


def _trace(
    forward: Callable[[dict[str, Tensor]], Tensor],
    inputs: Mapping[str, Tensor],
    dynamic_dims: Mapping[str, Sequence[int]],
    options: CompileOptions,
) -> BoundProgram:
    found: list[tuple[Program, list[Any], list[Any]]] = []

    def make_runtime(program: Program, weights: LiveWeights) -> Callable[[Sequence[Any]], list[Any]]:
        def run_and_remember(args: Sequence[Any]) -> list[Any]:
            inputs = [*args, *weights.current()]
            outputs = program.run(inputs)
            found.append((program, inputs, outputs))
            return outputs

        return run_and_remember

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        options.report(1)
        return compile_graph(module, example_inputs, options, make_runtime)

    options.report(0)
    examples = _distinct(inputs)
    for name, dims in dynamic_dims.items():
        for dim in dims:
            maybe_mark_dynamic(examples[name], dim)

    def call(inputs: dict[str, Tensor]) -> Tensor:
        return forward(inputs)

    # Dynamo's cache and limits are by code object.
    call.__code__ = call.__code__.replace(co_name=f"encoder_forward_{next(_trace_numbers)}")
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    handled = sys.exc_info()[1]
    try:
        with torch.inference_mode(False), torch.no_grad():
            result = compiled(examples)
    except TorchDynamoException as error:
        own = _own_error(error, handled)
        if own is not None:
            raise own from None
        cause = inner_error(error) or error.__cause__ or error
        why = f"{type(cause).__name__}: {str(cause).strip()}".splitlines()[0]
        raise UntraceableError(f"the forward does not trace as one graph: {why}") from error
    if len(found) != 1 or not isinstance(result, torch.Tensor):
        raise CompileError(
            f"the forward became {len(found)} graphs and returned {type(result).__name__}; "
            "expected 1 and a tensor"
        )
    bound = bind(*found[0], examples)
    _require_dynamic(bound, dynamic_dims)
    return bound


def _distinct(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the inputs as other tensors, each at an address of its own."""
    examples: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in inputs.items():
        if tensor.numel() == 0:
            raise CompileError(
                f"{name}: the example is empty ({tuple(tensor.shape)}); it needs at least one element"
            )
        examples[name] = tensor.clone() if tensor.data_ptr() in addresses else tensor.view_as(tensor)
        addresses.add(examples[name].data_ptr())
    return examples


def _require_dynamic(bound: BoundProgram, dynamic_dims: Mapping[str, Sequence[int]]) -> None:
    for name, shape in zip(bound.names, bound.program.input_shapes, strict=True):
        if name is None or shape is None:
            continue
        for dim in dynamic_dims.get(name, ()):
            if not shape[dim].symbols:
                raise CompileError(
                    f"the forward works for one size of dimension {dim} of {name} only ({shape[dim]}), "
                    "which is to vary"
                )


def _own_error(error: BaseException | None, handled: BaseException | None) -> FxSplitError | None:
    """Returns this library's error inside Dynamo's, which raises some "from None". The caller's handled one
    is no cause, though Python chains it.
    """
    while error is not None and error is not handled:
        if isinstance(error, FxSplitError):
            return error
        error = inner_error(error) or error.__cause__ or error.__context__
    return None
