"""Planning and tuning without torch: in a process where importing torch fails."""

import subprocess
import sys
import textwrap

WITHOUT_TORCH = """
    import sys

    sys.modules["torch"] = None

    import fxsplit_encoder.tuning
    from fxsplit_encoder.planning.limits import Limits
    from fxsplit_encoder.planning.plan import Item
    from fxsplit_encoder.planning.planner import build_plan
    from fxsplit_encoder.protocol import EncoderItemSpec

    limits = Limits({"default": (64, 128)}, max_items_per_batch=4, max_frames_per_batch=0)
    items = [Item(EncoderItemSpec(400, 100)), Item(EncoderItemSpec(80, 20))]
    for packing in ("cost", "greedy", "greedy_defer"):
        plan = build_plan(items, limits, packing=packing)
        print(plan.batches[0].paths["default"].budget)
"""


def test_a_request_is_planned_where_torch_cannot_be_imported() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_TORCH)], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["128"] * 3
