"""Inductor's cache: compiled graphs by their keys, without what compiles, which takes a second to import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.debug
from torch._dynamo.utils import counters
from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.codecache import FxGraphCache, InductorCacheArtifact, code_hash, get_path
from torch._inductor.output_code import CompiledFxGraphConstants
from torch._inductor.triton_bundler import TritonBundler
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.compiler._cache import CacheArtifactManager
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _triton

from fxsplit_encoder._torch.aot import tracing_context

SAME_IN_TORCH = frozenset(("addmm", "baddbmm", "bmm", "convolution", "mm"))
"""Kernels that Inductor takes from torch under the same name, as a test checks."""

_LIGHT = {
    f"from torch._inductor.{module} import {name}": f"from {__name__} import {own}"
    for module, name, own in (
        ("codegen.memory_planning", "_align as align", "align"),
        ("select_algorithm", "extern_kernels", "extern_kernels"),
    )
}


class _ExternKernels:
    def __getattr__(self, name: str) -> Any:
        if name in SAME_IN_TORCH:
            kernel = getattr(torch, name)
        else:
            from torch._inductor.select_algorithm import extern_kernels as all_of_them

            kernel = getattr(all_of_them, name)
        setattr(self, name, kernel)  # the next call finds it without this one
        return kernel


extern_kernels = _ExternKernels()


def align(num_bytes: int) -> int:
    """Calls Inductor's own, which only plans of memory do."""
    from torch._inductor.codegen import memory_planning

    own: Any = memory_planning
    return int(own._align(num_bytes))


def import_lightly(source: str) -> str:
    """Returns a generated module that imports both names from here, line for line as it was."""
    lines = source.split("\n")
    return "\n".join(_LIGHT.get(line.rstrip(), line) for line in lines)


def key_of(compiled: Any) -> tuple[str, str] | None:
    """Returns a graph's key in Inductor's cache and the guards on its sizes; None: it is not there."""
    key = getattr(compiled, "_fx_graph_cache_key", None)
    return None if key is None else (key, compiled.guards_expr or "")


def load_graph(key: str, guards: str) -> Callable[[list[Any]], Any] | None:
    """Returns the compiled graph of a key in Inductor's cache; None: it is not there."""
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    CompiledTritonKernels.cache_clear()
    with tracing_context(fake_mode), V.set_fake_mode(fake_mode):
        compiled = _found(key, guards)
        if compiled is None:
            return None
        constants = CompiledFxGraphConstants()
        compiled.after_deserialization(constants)
        options: Any = {"cudagraphs": BoxedBool(False), "is_backward": False, "is_inference": True}
        compiled.post_compile([], constants, options)
    compiled._fx_graph_cache_key = key
    return compiled  # type: ignore[no-any-return]


def _found(key: str, guards: str) -> Any:
    """A compiled graph without its module: `FxGraphCache.load_with_key` imports what compiles."""
    compiled: Any
    compiled, content, _ = FxGraphCache.find_guarded_entry(
        key, True, None, lambda found, hints: found == guards, []
    )
    if compiled is None or not _has_its_libraries(compiled):
        counters["inductor"]["fxgraph_cache_miss"] += 1
        return None
    counters["inductor"]["fxgraph_cache_hit"] += 1
    if content is not None:  # whoever saves artifacts saves this one again
        CacheArtifactManager.record_artifact(InductorCacheArtifact.type(), key, content)
    if compiled._triton_bundle:
        name_sources(compiled._triton_bundle)
        TritonBundler.read_and_emit(compiled._triton_bundle)
    source = import_lightly(compiled.source_code)
    if source != compiled.source_code:
        compiled.source_code = source
        compiled.cache_key = code_hash(source)  # the name of its file, where the other may be
    return compiled


def name_sources(bundle: Any) -> None:
    """Names the kernels' sources by this process's cache, where Inductor looks for their configurations."""
    for each in bundle.static_autotuners:
        source = Path(each.kernel.filename or "")
        if source.suffix:
            each.kernel.filename = get_path(source.stem, source.suffix.removeprefix("."))[2]


def _has_its_libraries(compiled: Any) -> bool:
    expected = getattr(compiled, "extern_libs_key", None)
    if expected is None:  # torch before 2.13
        return True
    try:
        return bool(_triton._extern_libs_key(_triton.triton_backend()) == expected)
    except (ImportError, OSError, RuntimeError, AttributeError):  # no such backend
        return False
