"""Inductor's cache: compiled graphs by their keys, without what compiles, which takes a second to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.codecache import FxGraphCache
from torch._inductor.output_code import CompiledFxGraphConstants
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxsplit_encoder._torch.aot import tracing_context

__all__ = ["key_of", "load_graph"]


def key_of(compiled: Any) -> tuple[str, str] | None:
    """What Inductor's cache finds a compiled graph by: its key, and the conditions on sizes that it was
    compiled under. None: it is not in the cache.
    """
    key = getattr(compiled, "_fx_graph_cache_key", None)
    return None if key is None else (key, compiled.guards_expr or "")


def load_graph(key: str, guards: str) -> Callable[[list[Any]], Any] | None:
    """The compiled graph of a key in Inductor's cache, without the graph that it was compiled from; None: it
    is not there.
    """
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    constants = CompiledFxGraphConstants()
    CompiledTritonKernels.cache_clear()  # type: ignore[no-untyped-call]
    with tracing_context(fake_mode), V.set_fake_mode(fake_mode):
        compiled, _ = FxGraphCache.load_with_key(
            key,
            [],
            [],
            local=True,
            remote_cache=None,
            is_backward=False,
            constants=constants,
            evaluate_guards=lambda found, hints: found == guards,
        )
        if compiled is None:
            return None
        options: Any = {"cudagraphs": BoxedBool(False), "is_backward": False, "is_inference": True}
        compiled.post_compile([], constants, options)
    compiled._fx_graph_cache_key = key
    return compiled
