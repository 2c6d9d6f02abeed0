"""Every private API that `fxsplit_encoder/_torch` uses has a row in docs/private_apis.md, is there, and takes
what it is given. A release of torch that changes one fails here, with its name.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from .private_uses import PACKAGE, Call, own_names, private_uses

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "private_apis.md"


@dataclass(frozen=True)
class Symbol:
    """One private name, as the page lists it; by default it is found by that and not called."""

    name: str
    get: Callable[[], Any] | None = None
    """The object itself, where the name alone does not lead to it."""
    arguments: int | None = None
    """How many it is given by position, `self` included; None: it is not called, or by its name, so that
    `CALLS` says how."""
    keywords: tuple[str, ...] = ()
    """Those that it is given by name."""
    since: str = ""
    """The first version of its library that has it, where older ones do without."""


def called(name: str, arguments: int, *keywords: str) -> Symbol:
    return Symbol(name, None, arguments, keywords)


def attribute(name: str, owner: Callable[[], Any]) -> Symbol:
    """An attribute that an object has only once it is made."""
    return Symbol(name, lambda: getattr(owner(), name.rpartition(".")[2]))


def field(name: str, since: str = "") -> Symbol:
    """A field of a dataclass."""
    owner, _, last = name.rpartition(".")
    return Symbol(name, lambda: resolve_name(owner).__dataclass_fields__[last], since=since)


def parameter(name: str) -> Symbol:
    """What an object is made of, under the name that it keeps."""
    owner, _, last = name.rpartition(".")
    return Symbol(name, lambda: signature_of(resolve_name(owner)).parameters[last])


def elsewhere(symbol: Symbol, place: str) -> Symbol:
    """Found at another place than it is used at."""
    return replace(symbol, get=lambda: resolve_name(place))


def shape_env() -> Any:
    return resolve_name("torch.fx.experimental.symbolic_shapes.ShapeEnv")()


def sym_node() -> Any:
    return shape_env().create_unbacked_symint().node


def wrapped_backend() -> Any:
    return resolve_name("torch._dynamo.repro.after_dynamo.WrapBackendDebug")(len, "eager")


def hooked_module() -> Any:
    hooks = resolve_name("accelerate.hooks")
    return hooks.add_hook_to_module(torch.nn.Identity(), hooks.AlignDevicesHook("cpu"))


EXC = "torch._dynamo.exc"
INDUCTOR = "torch._inductor"
GRAPH = f"{INDUCTOR}.output_code.CompiledFxGraph"
TRANSLATOR = "torch._dynamo.symbolic_convert.InstructionTranslator"
TREES = "torch.utils._pytree"
PTRS = "torch._C._tensors_data_ptrs_at_indices_equal"
CHECKED = [
    # allocator
    called("torch.cuda.MemPool.use_count", 1),
    # aot
    attribute(
        "torch._guards.TracingContext.fw_metadata", lambda: resolve_name("torch._guards.TracingContext")(None)
    ),
    field("torch._functorch._aot_autograd.schemas.ViewAndMutationMeta.static_input_indices"),
    called("torch._subclasses.fake_tensor.unset_fake_temporarily", 0),
    elsewhere(
        Symbol("torch._subclasses.fake_tensor.FakeTensor.fake_mode"),
        "torch._subclasses.fake_tensor.FakeTensor",
    ),
    called("torch._subclasses.fake_tensor.FakeTensorMode.from_tensor", 2, "static_shapes"),
    called("torch.fx.experimental.proxy_tensor.make_fx", 1, "decomposition_table", "tracing_mode"),
    attribute(
        "torch._functorch.aot_autograd.make_boxed_func._boxed_call",
        lambda: resolve_name("torch._functorch.aot_autograd.make_boxed_func")(len),
    ),
    # device
    # dispatch
    attribute("torch._ops.OpOverload._schema", lambda: torch.ops.aten.mm.default),
    called("torch.utils._python_dispatch.TorchDispatchMode", 0),
    called(f"{TREES}.tree_flatten", 1),
    called(f"{TREES}.tree_unflatten", 2),
    called("torch.ops.aten._flash_attention_forward.default", 10, "scale"),
    replace(
        called("torch.ops.aten._flash_attention_forward_no_dropout_inplace.default", 11, "scale"),
        since="2.13",
    ),
    called("torch.ops.aten._scaled_dot_product_cudnn_attention.default", 8, "scale"),
    called("torch.ops.aten._addmm_activation.default", 3, "use_gelu"),
    # distributed
    called("torch.ops._c10d_functional.wait_tensor.default", 1),
    # dynamo
    called("torch._dynamo.mark_dynamic", 2),
    called("torch._dynamo.decorators.mark_unbacked", 2),
    called("torch._guards.CompileContext.current_compile_id", 0),
    attribute(
        "torch._guards.TracingContext.guards_context.dynamo_guards",
        lambda: resolve_name("torch._guards.TracingContext")(None).guards_context,
    ),
    attribute("torch._guards.GuardsSet.inner", lambda: resolve_name("torch._guards.GuardsSet")()),
    parameter("torch._guards.Guard.originating_source"),
    parameter("torch._dynamo.output_graph.OutputGraph.compiler_fn"),
    parameter("torch._dynamo.output_graph.OutputGraph.root_tx"),
    parameter(f"{TRANSLATOR}.f_locals"),
    Symbol("torch._C._dynamo.eval_frame.set_fullgraph_compiled_frame_count", since="2.13"),
    attribute("torch._dynamo.repro.after_dynamo.WrapBackendDebug._torchdynamo_orig_backend", wrapped_backend),
    attribute("torch._dynamo.repro.after_dynamo.WrapBackendDebug.__wrapped__", wrapped_backend),
    called(f"{EXC}.TensorifyScalarRestartAnalysis", 0, "restart_reason"),
    called(f"{EXC}.UnspecializeRestartAnalysis", 0, "restart_reason"),
    attribute(
        f"{EXC}.BackendCompilerFailed.inner_exception",
        lambda: resolve_name(f"{EXC}.BackendCompilerFailed")(len, ValueError(), None),
    ),
    attribute(
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod", lambda: torch.compile(torch.nn.Identity())
    ),
    Symbol(
        "torch._dynamo.eval_frame.OptimizedModule.dynamo_ctx.callback",
        lambda: resolve_name("torch").compile(torch.nn.Identity()).dynamo_ctx.callback,
    ),
    # inductor
    Symbol("torch.utils._triton._extern_libs_key", since="2.13"),
    called(f"{GRAPH}.after_deserialization", 2),
    *(
        field(f"{GRAPH}.{name}")
        for name in ("_triton_bundle", "cache_key", "source_code", "_fx_graph_cache_key", "guards_expr")
    ),
    field(f"{GRAPH}.extern_libs_key", "2.13"),
    called(f"{INDUCTOR}.codegen.memory_planning._align", 1),
    called(f"{GRAPH}.post_compile", 4),
    called(f"{INDUCTOR}.decomposition.select_decomp_table", 0),
    replace(Symbol(f"{INDUCTOR}.config.batch_invariant"), since="2.13"),
    called(f"{INDUCTOR}.choices.InductorChoices", 0),
    called(f"{INDUCTOR}.choices.InductorChoices.should_use_persistent_reduction", 2),
    called(f"{INDUCTOR}.codegen.simd_kernel_features.SIMDKernelFeatures.get_reduction_hint", 1),
    elsewhere(
        called(f"{INDUCTOR}.virtualized.V.graph.sizevars.statically_known_leq", 3),
        f"{INDUCTOR}.sizevars.SizeVarAllocator.statically_known_leq",
    ),
    # symbols
    called("torch._check", 2),
    called("torch.utils._sympy.functions.FloorDiv", 2),
    called("torch.utils._sympy.functions.Mod", 2),
    called("torch.utils._sympy.functions.PythonMod", 2),
    called("torch.utils._sympy.printers.PythonPrinter.doprint", 2),
    attribute("torch.fx.experimental.sym_node.SymNode._expr", sym_node),
    called("torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symintnode", 2, "hint"),
    called("torch.fx.experimental.sym_node.SymNode.has_hint", 1),
    attribute("torch.fx.experimental.symbolic_shapes.ShapeEnv.guards", shape_env),
    attribute("torch.fx.experimental.symbolic_shapes.ShapeEnv.var_to_range", shape_env),
    called("torch.fx.experimental.symbolic_shapes.ShapeEnv.replace", 2),
    # tensors
    called("torch.multiprocessing.reductions.StorageWeakRef.expired", 1),
    # transformers
    attribute(
        "transformers.PretrainedConfig._attn_implementation_internal",
        lambda: resolve_name("transformers.PretrainedConfig")(),
    ),
    replace(called("transformers.utils.output_capturing.selected_hidden_states", 1), since="5.23"),
    called("transformers.models.llama4.modeling_llama4.Llama4VisionRotaryEmbedding._compute_freqs_ci", 1),
    attribute("accelerate.hooks.add_hook_to_module._hf_hook", hooked_module),
    attribute("accelerate.hooks.add_hook_to_module._old_forward", hooked_module),
    # tensors
    Symbol(PTRS, lambda: resolve_name(PTRS) if torch.backends.cuda.is_built() else None),
    # triton
    elsewhere(Symbol("triton.runtime.driver.active"), "triton.runtime.driver.DriverConfig.active"),
    called("triton.compiler.compiler.CompiledKernel.__getitem__", 2),
    called("triton.runtime.cache.FileCacheManager.put", 3, "binary"),
    called("triton.runtime.cache.FileCacheManager.put_group", 3),
]


ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
NAMES = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
KNOWN = {
    **{name: attribute(name, torch.nn.Module) for name in NAMES if name.startswith("torch.nn.Module._")},
    **{each.name: each for each in CHECKED},
}
SYMBOLS = [KNOWN.get(name, Symbol(name)) for name in NAMES]


def signature_of(value: Any) -> inspect.Signature:
    """Of an operator what its schema declares."""
    schema = getattr(value, "_schema", None)
    if schema is None:
        return inspect.signature(value)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return inspect.Signature(
        [
            inspect.Parameter(
                f"{argument.name}_" if argument.name == "self" else argument.name,
                kinds[argument.kwarg_only],
                default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
            )
            for argument in schema.arguments
        ]
    )


def all_uses() -> dict[str, tuple[set[str], set[Call]]]:
    """What each file of the package uses of others' private parts, and how it calls what it imports."""
    trees = {
        str(path.relative_to(ROOT / PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
    }
    own = own_names(trees.values())
    return {path: private_uses(tree, own) for path, tree in trees.items()}


USES = all_uses()
CALLS: defaultdict[str, list[tuple[int, tuple[str, ...]]]] = defaultdict(list)
for _, calls in USES.values():
    for called_name, given_arguments, given_keywords in calls:
        CALLS[called_name].append((given_arguments, given_keywords))
USING = [path for path in USES if path.startswith("_torch/")]


@pytest.mark.parametrize("symbol", SYMBOLS, ids=[symbol.name for symbol in SYMBOLS])
def test_a_private_api_is_there_and_takes_what_it_is_given(symbol: Symbol) -> None:
    pytest.importorskip(symbol.name.partition(".")[0], symbol.since or None)
    value = resolve_name(symbol.name) if symbol.get is None else symbol.get()
    ways = CALLS[symbol.name] if symbol.get is None else []
    if symbol.arguments is not None:
        ways = [(symbol.arguments, symbol.keywords)]
    for arguments, keywords in ways:
        try:
            signature = signature_of(value)
        except ValueError:
            return  # a function in C tells none
        given: Any = dict.fromkeys(keywords)
        signature.bind(*range(arguments), **given)


def listed(use: str) -> bool:
    """Whether a use is a symbol, or the way to one, or an attribute (".name") of some object."""
    if use.startswith("."):
        return any(f"{name}.".find(f"{use}.") > 0 for name in NAMES)
    return any(f"{name}.".startswith(f"{use}.") for name in NAMES)


@pytest.mark.parametrize("path", USING)
def test_every_private_api_that_is_used_is_checked(path: str) -> None:
    assert [use for use in sorted(USES[path][0]) if not listed(use)] == []


def test_no_private_api_is_used_elsewhere() -> None:
    assert {path: used for path, (used, _) in USES.items() if used and path not in USING} == {}


def test_the_page_lists_what_is_checked() -> None:
    assert {symbol.name for symbol in CHECKED} <= set(NAMES)


@pytest.mark.parametrize(
    ("code", "uses"),
    [
        ("import torch\ntorch._C._f()", {"torch._C._f"}),
        ("from torch.utils import _pytree", {"torch.utils._pytree"}),
        ("from triton.runtime import driver", {"triton.runtime.driver"}),
        ("import torch\naten = torch.ops.aten\naten._f.default(1)", {"torch.ops.aten._f.default"}),
        ("storage._cdata, self._version", {"._cdata"}),
        ("node._erased, node._ours, node._fxsplit_mark", {"._erased"}),
        ("getattr(op, '_schema', None)", {"._schema"}),
        ("import torch, sys\nsys._getframe()\ntorch.__version__, torch.nn.Linear", set()),
    ],
)
def test_private_apis_are_resolve_name(code: str, uses: set[str]) -> None:
    assert private_uses(ast.parse(code), frozenset({"_ours", "_version"}))[0] == uses
