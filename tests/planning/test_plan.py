import subprocess
import sys
import textwrap

from fxsplit_encoder.planning.plan import MissReason, PathPlan, Plan, PlannedBatch

HIT = PlannedBatch((0, 2), {"global": PathPlan(80, 100), "local": PathPlan(0)}, 81)
MISS = PlannedBatch(
    (1,), {"global": PathPlan(80, 100), "local": PathPlan(70, None, MissReason.OVER_LARGEST_BUDGET)}, 151
)
PADDING = PlannedBatch((3,), {"global": PathPlan(30, 100), "local": PathPlan(0, 100)}, 30)


def test_an_empty_plan() -> None:
    plan = Plan((), 0)
    assert (plan.hits, plan.misses, plan.padding_fraction, plan.milliseconds) == (0, {}, 0.0, 0)
    assert str(plan) == "0 items in 0 batches: 0 hit; 0.0% padding"


def test_an_item_is_a_hit_if_every_path_is_a_replay_or_skipped() -> None:
    plan = Plan((HIT, MISS, PADDING), 4)
    assert [batch.reason for batch in plan.batches] == [None, MissReason.OVER_LARGEST_BUDGET, None]
    assert (plan.hits, plan.misses) == (3, {MissReason.OVER_LARGEST_BUDGET: 1})
    assert plan.padding_fraction == 1 - 190 / 400
    results = [path.result for batch in plan.batches for path in batch.paths.values()]
    assert results == ["hit", "skipped", "hit", "over_largest_budget", "hit", "hit"]


def test_the_time_is_known_if_that_of_every_batch_is() -> None:
    timed = PlannedBatch((0,), {"default": PathPlan(60, 64, milliseconds=1.25)}, 60, (), 1.5)
    assert Plan((timed, timed), 2).milliseconds == 3.0
    assert Plan((timed, HIT), 3).milliseconds is None


def test_printing_shows_every_batch() -> None:
    many = PlannedBatch(tuple(range(1, 13)), {"default": PathPlan(48, 64)}, 48)
    over = PlannedBatch((0,), {"default": PathPlan(300, reason=MissReason.OVER_LARGEST_BUDGET)}, 300)
    summary, header, _, *rows = str(Plan((many, over), 13)).splitlines()
    assert summary == "13 items in 2 batches: 12 hit, 1 over_largest_budget; 25.0% padding"
    assert header.split() == ["batch", "items", "path", "tokens", "budget", "padding", "%", "result"]
    assert [row.split() for row in rows] == [
        "0 1, 2, 3, 4, 5, 6, 7, 8 and 4 more default 48 64 25.0 hit".split(),
        "1 0 default 300 - - over_largest_budget".split(),
    ]


def test_printing_shows_predicted_times_where_they_are_known() -> None:
    paths = {
        "global": PathPlan(60, 64, milliseconds=1.72),
        "local": PathPlan(300, None, MissReason.EAGER_IS_FASTER, eager=True),
    }
    unknown = PlannedBatch((0,), paths, 360)
    summary, header, _, *rows = str(Plan((unknown,), 1)).splitlines()
    assert summary.endswith("; 6.2% padding")
    assert header.split()[-2:] == ["predicted", "ms"]
    assert [row.split()[-2:] for row in rows] == [["hit", "1.7"], ["(eager)", "-"]]

    known = PlannedBatch((0,), {"global": paths["global"]}, 60, (), 1.87)
    assert str(Plan((known,), 1)).splitlines()[0].endswith("; 6.2% padding; 1.9 ms predicted")


# --- without torch: in a process where importing torch fails


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
