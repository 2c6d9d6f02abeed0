"""`encoder-cg tune`: from a trace of requests to a configuration with the budgets that serve it best."""

from __future__ import annotations

from pathlib import Path

import yaml

import fxsplit_encoder as fx
from fxsplit_encoder.cli.document import Document
from fxsplit_encoder.config import Packing
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.tuning import LadderLimits, read_costs, read_trace, tune_trace


def run_tune(
    trace: Path,
    output: Path,
    limits: LadderLimits,
    *,
    costs: Path | None,
    packing: Packing,
    document: Document,
) -> None:
    """Choose budgets for a trace, print what they would do compared with powers of two, and write YAML.

    Raises:
        InputError: the trace, the costs, an option or the output's directory is not usable.
    """
    requests = read_trace(trace)
    if not requests:
        raise InputError(f"{trace}: expected one request per line; got an empty trace")
    tuning = tune_trace(requests, limits, costs=read_costs(costs) if costs else None, packing=packing)
    num_items = sum(len(request) for request in requests)
    what = f"{len(requests)} requests, {num_items} items"
    document.facts({"trace": f"{trace}, {what}", "costs": str(costs or "estimated"), "packing": packing})
    document.put("tuning", {}, f"\n{tuning}")
    made_from = f"# Tuned for {trace.name}: {what}; at most {limits.max_graphs} graphs of each path.\n"
    settings = tuning.to_config().model_dump(mode="json", exclude_unset=True)
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
    output.write_text(made_from + text, encoding="utf-8")
    document.put("file", str(output), f"\nwrote {output}")


def parse_bytes(size: str) -> int:
    """The bytes of a size, as the configuration reads it.

    Raises:
        InputError: it is no such size.
    """
    try:
        parsed = fx.EncoderConfig(max_graph_bytes=size).max_graph_bytes
    except ConfigError as error:
        raise InputError(f"--max-bytes {size}: {error}") from None
    assert parsed is not None
    return parsed
