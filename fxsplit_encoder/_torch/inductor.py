"""Inductor: compiles a graph of ATen operations for symbolic sizes. Importing this loads Inductor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import fx
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile, maybe_warm_pool
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V

from fxsplit_encoder._torch.aot import fake_mode_of, tracing_context
from fxsplit_encoder._torch.symbols import under_own_name

__all__ = ["select_decomp_table"]

LONGEST_ROW = 4096
"""Entries of a row that stay in registers; blocks of vision towers are 768 to 3200 wide."""

# Methods that give the blocks in which a row is to be reduced: of 2.14 for sums alone, and of later ones.
_BLOCKS = ("strict_sum_rblock", "strict_reduction_rblock")

# Settings that forbid choices by time, and by sizes, where they show in the numbers. 2.13 has the first.
_INVARIANT = ("batch_invariant", "deterministic")


@functools.cache
def start_workers() -> None:
    """Starts Inductor's processes for Triton kernels, once, and polls whether they are ready."""
    maybe_warm_pool()
    started = getattr(AsyncCompile.process_pool, "cache_info", None)
    if started is not None and started().currsize:
        AsyncCompile.use_process_pool()


def compile_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    invariant: bool = False,
    layouts: Mapping[str, bool] = MappingProxyType({}),
) -> Callable[[list[Any]], Any]:
    """Compiles an inference graph for all sizes of its symbols, through Inductor's cache.

    Args:
        module: the graph, decomposed by `select_decomp_table`.
        inputs: traced values, as many as the graph has inputs.
        invariant: whether no kernel is chosen by time or a guessed size, where that changes its sums.
        layouts: Inductor's settings for layouts of convolutions; without any, they keep those they have.

    Returns a function of the list of arguments, which it empties.
    """
    fake_mode = fake_mode_of(inputs)
    # On a CPU Inductor makes convolutions channels-last, and where the batch is unbacked it then expects
    # other strides than the kernel returns. A smaller block for long rows that take many registers is made
    # when a kernel is loaded, at every start anew: it is compiled and timed then, which took a second, and
    # neither is kept.
    if layouts:  # inside: results have the strides that other pieces were compiled for
        results = module.graph.output_node()
        count = len(results.args[0]) if isinstance(results.args[0], tuple | list) else 1
        results.meta["user_visible_output_idxs"] = [*range(count)]
    with (
        tracing_context(fake_mode),
        V.set_fake_mode(fake_mode),
        config.patch({"layout_optimization": False, **layouts}),
        config.patch(dynamic_scale_rblock=False),
        config.patch({name: True for name in _INVARIANT if invariant and hasattr(config, name)}),
        persistent_rows(),
    ):
        values = [under_own_name(value) for value in inputs]
        compiled: Any = compile_fx_inner(module, values, is_inference=True, cudagraphs=BoxedBool(False))
    return compiled  # type: ignore[no-any-return]


class PersistentRows(InductorChoices):
    """Inductor's heuristics, but rows of up to `LONGEST_ROW` entries, not 1024, stay in registers."""

    def uuid(self) -> str:
        """Returns the key of these choices in Inductor's caches."""
        return f"{type(self).__name__}-{LONGEST_ROW}"

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:  # type: ignore[override]
        """Whether a reduction keeps its rows in registers, see `InductorChoices`."""
        if super().should_use_persistent_reduction(features, cooperative_reduction):
            return True
        if cooperative_reduction or not config.triton.persistent_reductions or _is_ordered(features):
            return False
        return features.get_reduction_hint() == ReductionHint.INNER and V.graph.sizevars.statically_known_leq(
            features.reduction_numel, LONGEST_ROW
        )


def _is_ordered(features: Any) -> bool:
    asked = (getattr(features, name, None) for name in _BLOCKS)
    return any(block is not None and block() is not None for block in asked)


@contextmanager
def persistent_rows() -> Iterator[None]:
    """Compiles with `PersistentRows`, unless the user or torch has other choices."""
    if config.inductor_choices_class is not None or type(V.choices) is not InductorChoices:
        yield
        return
    # The setting is part of the key of Inductor's cache of graphs; the handler is what is asked.
    with config.patch(inductor_choices_class=PersistentRows), V.set_choices_handler(PersistentRows()):
        yield
