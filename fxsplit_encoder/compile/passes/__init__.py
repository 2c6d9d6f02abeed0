"""Graph passes: rewrites of the ATen graph before it is split.

A pass returns the number of places that it changed; its docstring says why the results stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from fxsplit_encoder.compile.layouts import keeping_layouts
from fxsplit_encoder.compile.passes.activations import gelu_epilogue, measured_activations
from fxsplit_encoder.compile.passes.conv_to_linear import conv_to_linear
from fxsplit_encoder.compile.passes.decomposed_bias import decomposed_bias
from fxsplit_encoder.compile.passes.folded_adapters import folded_adapters
from fxsplit_encoder.compile.passes.merged_projections import merged_projections
from fxsplit_encoder.compile.passes.output_branch import output_branch
from fxsplit_encoder.compile.passes.own_kernels import dense_attention, fixed_products
from fxsplit_encoder.compile.passes.pad_mlp_width import pad_mlp_width
from fxsplit_encoder.compile.passes.wide_heads import stored_width, wide_heads
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.kernels.products.measured import has_fused_activations

Pass = Callable[[fx.GraphModule], int]

PASSES: Mapping[str, Pass] = {
    # The others find layers without adapters then.
    "folded_adapters": folded_adapters,
    "conv_to_linear": conv_to_linear,
    "pad_mlp_width": pad_mlp_width,
    "decomposed_bias": decomposed_bias,
    "dense_attention": dense_attention,
    # Heads are made wider in the layer that there is then.
    "merged_projections": merged_projections,
    "wide_heads": wide_heads,
    "measured_activations": measured_activations,
    # It fuses the activations that the one before leaves.
    "gelu_epilogue": gelu_epilogue,
    # It marks the nodes that the others leave.
    "output_branch": output_branch,
}
"""The passes, by the names that `EncoderConfig.passes` takes, in the order in which they run."""

DEFAULT_PASSES: Mapping[str, tuple[str, ...]] = {"cpu": ("conv_to_linear",), "cuda": tuple(PASSES)}
"""What `passes: auto` stands for, by the type of the device; on others nothing."""

# Passes that keep parameters in another form, see `compile.derived`.
_DERIVING = frozenset(
    {
        *("folded_adapters", "conv_to_linear", "pad_mlp_width", "merged_projections", "wide_heads"),
        "measured_activations",
    }
)

BEFORE_MASKS = ("folded_adapters",)
"""Passes that run before pad rows are masked: beside a layer an adapter reads attention's result too, so that
the mask would stand before the layer instead of after it."""


def default_passes(device: torch.device, invariant: bool = False) -> tuple[str, ...]:
    """Returns the passes of `passes: auto` on a device: with one order of sums none that measures."""
    names = DEFAULT_PASSES.get(device.type, ())
    if device.type != "cuda":
        return names
    capability = torch.cuda.get_device_capability(device)
    pays = {
        # Where kernels have activations in their epilogue that torch's have not.
        "measured_activations": has_fused_activations(capability) and not invariant,
        "decomposed_bias": capability >= (9, 0),  # cuDNN's kernels for wide heads are of Hopper
    }
    return tuple(name for name in names if pays.get(name, True))


def expected_width(width: int, names: Sequence[str] | None, device: torch.device) -> int:
    """Returns the stored width of attention heads, before there is a graph; arguments as for `passes_for`."""
    chosen = default_passes(device) if names is None else names
    return stored_width(width) if wide_heads.__name__ in chosen else width


def passes_for(
    names: Sequence[str] | None,
    device: torch.device,
    invariant: bool = False,
    *,
    may_derive: bool = True,
) -> dict[str, Pass]:
    """Returns passes in the order of `PASSES`: those `names`, or for None those that pay on this device;
    without `may_derive` none that keeps parameters in another form. ConfigError: there is no such pass.
    """
    chosen = default_passes(device, invariant) if names is None else names
    if unknown := [name for name in chosen if name not in PASSES]:
        raise ConfigError(f"passes: no pass is called {', '.join(unknown)}; allowed: {', '.join(PASSES)}")
    due: dict[str, Pass] = {}
    for name, run in PASSES.items():
        # After all passes that see layers by torch's names; marks go to the nodes that it leaves.
        if invariant and name == "output_branch":
            due["fixed_products"] = fixed_products
        if name in chosen and (may_derive or name not in _DERIVING):
            due[name] = run
    return due


def run_passes(module: fx.GraphModule, due: Mapping[str, Pass]) -> dict[str, int]:
    """Runs passes over a graph; returns the number of places that each changed."""
    changed: dict[str, int] = {}
    for name, run in due.items():
        with keeping_layouts(module.graph):
            changed[name] = run(module)
            if changed[name]:
                module.graph.eliminate_dead_code()
    return changed
