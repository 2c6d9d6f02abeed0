"""`encoder-cg tune`: from a trace of requests to a configuration with the budgets that serve it best."""

from __future__ import annotations

from pathlib import Path

import yaml

from fxsplit_encoder.cli.costs import ESTIMATE_NOTE, FoundCosts
from fxsplit_encoder.cli.document import Document
from fxsplit_encoder.config import EncoderConfig, Packing
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.tuning import LadderLimits, read_trace, tune_trace


def run_tune(
    trace: Path,
    output: Path | None,
    limits: LadderLimits,
    found: FoundCosts,
    packing: Packing,
    document: Document,
) -> None:
    """Choose budgets for a trace, and say what they would do compared with others.

    Args:
        output: where the configuration goes; None: it is printed.

    Raises:
        InputError: the trace, the costs or an option is not usable.
    """
    requests = read_trace(trace)
    if not requests:
        raise InputError(f"{trace}: expected one request per line; got an empty trace")
    num_items = sum(len(request) for request in requests)
    what = f"{len(requests)} requests, {num_items} items"
    document.facts({"trace": f"{trace}, {what}", "costs": found.source, "packing": packing})
    if found.costs is None:
        document.notes([ESTIMATE_NOTE])
    tuning = tune_trace(requests, limits, costs=found.costs, packing=packing, current=found.current)
    document.put("tuning", tuning.as_dict(), f"\n{tuning}\n\n{tuning.advice}")
    settings = tuning.to_config().model_dump(mode="json", exclude_unset=True)
    made_from = f"# Tuned for {trace.name}: {what}; at most {limits.max_graphs} graphs of each path.\n"
    text = made_from + yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
    if output is None:
        document.put("config", settings, f"\n{text}".rstrip())
        return
    output.write_text(text, encoding="utf-8")
    document.content["config"] = settings
    document.put("file", str(output), f"\nwrote {output}")


def parse_bytes(size: str) -> int:
    """The bytes of a size, as the configuration reads it.

    Raises:
        InputError: it is no such size.
    """
    try:
        parsed = EncoderConfig(max_graph_bytes=size).max_graph_bytes
    except ConfigError as error:
        raise InputError(f"--max-bytes {size}: {error}") from None
    assert parsed is not None
    return parsed
