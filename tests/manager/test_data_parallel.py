"""Shares of a request on several ranks, joined to what one process returns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import fxsplit_encoder as fx
from fxsplit_encoder.errors import ConfigError, InputError, RankError
from fxsplit_encoder.manager.data_parallel import DataParallel, assign_items

from ..small_tower import FEATURES, SmallAdapter, SmallTower
from .data_parallel_workers import CPU, FAILING_RANK, LIMITS, ROWS, SHORT, run_ranks
from .mock_towers import assert_equal_items

pytestmark = pytest.mark.usefixtures("traced_once")

MODES = ("full", "piecewise", "none")

weights = st.lists(st.one_of(st.integers(0, 50), st.floats(0, 50)), max_size=7)


# --- the assignment


@given(st.lists(st.floats(0, 1e6), max_size=40), st.integers(1, 9))
def test_every_item_goes_to_one_rank(weights: list[float], num_ranks: int) -> None:
    shares = assign_items(weights, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(itertools.chain(*shares)) == list(range(len(weights)))
    assert all(share == sorted(share) for share in shares)
    assert shares == assign_items(weights, num_ranks)


@given(weights, st.integers(1, 3))
def test_the_heaviest_rank_is_within_grahams_bound_of_the_optimum(
    weights: list[float], num_ranks: int
) -> None:
    def heaviest(ranks: tuple[int, ...]) -> float:
        return max(
            sum(w for w, r in zip(weights, ranks, strict=True) if r == rank) for rank in range(num_ranks)
        )

    optimum = min(map(heaviest, itertools.product(range(num_ranks), repeat=len(weights))))
    shares = assign_items(weights, num_ranks)
    assigned = max(sum(weights[index] for index in share) for share in shares)
    assert assigned <= optimum * (4 / 3 - 1 / (3 * num_ranks)) + 1e-9


def test_the_heaviest_goes_first_and_ties_go_to_the_first_item_and_rank() -> None:
    assert assign_items([5, 5, 4, 4, 3, 3, 3], 3) == [[0, 4, 6], [1, 5], [2, 3]]
    assert assign_items([1, 9], 4) == [[1], [0], [], []]


# --- the group


def manager_of(**settings: Any) -> fx.EncoderCudaGraphManager:
    config = fx.EncoderConfig(**LIMITS, **settings)
    return fx.EncoderCudaGraphManager(SmallAdapter(), config, log_interval=0)


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(ConfigError, match=r"data_parallel: .* call torch\.distributed\.init_process_group"):
        manager_of(data_parallel=True)


@pytest.fixture
def group_of_one(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_of_one_rank_is_a_single_process(group_of_one: None, make_batch: Any) -> None:
    inputs = make_batch([(1, 4, 4), (1, 8, 8)], [(2, 4, 4)], features=FEATURES)
    alone, parallel = (manager_of(mode="none", data_parallel=value) for value in (False, True))
    assert all(map(torch.equal, parallel.execute(inputs), alone.execute(inputs)))
    assert parallel.execute({key: value[:0] for key, value in inputs.items()}) == []
    assert parallel.stats() == alone.stats()
    with pytest.raises(InputError):
        parallel.execute({**inputs, "pixel_values": inputs["pixel_values"][1:]})


def test_a_group_without_this_process_is_refused(group_of_one: None) -> None:
    with pytest.raises(ConfigError, match="this process is not in the process group"):
        DataParallel(dist.GroupMember.NON_GROUP_MEMBER, CPU)


# --- several ranks


GRIDS = [(1, 2 * (1 + 5 * n % 6), 2 * (2 + 3 * n % 7)) for n in range(12)]


@pytest.fixture(scope="module")
def inputs(make_batch: Any) -> dict[str, dict[str, Any]]:
    grids: dict[str, tuple[list[Any], list[Any]]] = {
        "mixed images": (GRIDS, []),
        "videos beside images": (GRIDS[:3], [(2, 4, 4), (9, 2, 2), (3, 2, 6)]),
        "videos": ([], [(1, 4, 4), (4, 2, 4), (8, 4, 4)]),
        "over the largest budget": ([(1, 4, 4), (1, 18, 18), (1, 16, 16)], []),
        "fewer items than ranks": ([(1, 8, 8)], []),
        "nothing": ([], []),
    }
    return {name: make_batch(*each, seed=len(name), features=FEATURES) for name, each in grids.items()}


@pytest.fixture(scope="module")
def ranks(make_batch: Any, inputs: Any, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """What each of two ranks reports; one start of the processes serves all tests."""
    good, other = (
        make_batch(grids, features=FEATURES) for grids in ([(1, 4, 4), (1, 8, 8), (1, 4, 6)], [(1, 4, 4)])
    )
    tower = SmallTower()
    job = {
        "faults": {"tower": tower, "good": good, "other": other},
        "fake towers": {},
        "lost ranks": {"tower": tower, "good": good, "num_items": 3},
        "requests": {"tower": tower, "modes": MODES, "inputs": inputs},
        "invariant": {"tower": tower, "inputs": inputs["videos beside images"]},
    }
    return run_ranks(2, tmp_path_factory.mktemp("two"), job)


@pytest.fixture(scope="module")
def single(one_thread: None) -> dict[str, fx.EncoderCudaGraphManager]:
    """One process of every mode."""
    managers = {mode: manager_of(mode=mode) for mode in MODES}
    for manager in managers.values():
        manager.capture()
    return managers


def test_every_rank_returns_what_one_process_returns(ranks: Any, single: Any, inputs: Any) -> None:
    """Bit for bit what it returns for each rank's items: not every CPU's matrix product gives a row the same
    result among more rows, so with all items at once it may return other last bits.
    """
    checked = 0
    for (mode, manager), (name, batch) in itertools.product(single.items(), inputs.items()):
        together = manager.execute(batch)
        specs = manager.tower.get_encoder_cudagraph_item_specs(batch) if batch else []
        for own in filter(None, assign_items([spec.input_size for spec in specs], len(ranks))):
            alone = manager.execute(manager.tower.select_encoder_cudagraph_items(batch, own))
            for rank in ranks:
                assert len(rank[mode, name]) == len(together)
                returned = [rank[mode, name][index] for index in own]
                assert all(map(torch.equal, returned, alone)), (mode, name)
                assert_equal_items(returned, [together[index] for index in own])
                checked += len(own)
    assert checked == 25 * len(ranks) * len(MODES)


def test_invariant_ranks_give_the_bits_of_one_process(ranks: Any, inputs: Any, one_thread: None) -> None:
    manager = manager_of(mode="piecewise", invariant=True)
    manager.capture()
    expected = manager.execute(inputs["videos beside images"])
    for results in ranks:
        assert all(map(torch.equal, results["invariant"], expected))
        assert len(results["invariant"]) == len(expected)


def test_ranks_that_chose_other_kernels_are_told(ranks: Any) -> None:
    for rank, results in enumerate(ranks):
        assert results["invariant: same"] is None
        kind, message = results["invariant: others"]
        assert kind is ConfigError
        assert "kernels: expected the same on every rank; rank 1 differs from rank 0" in message
        assert f"this one, rank {rank}" in message


def test_every_item_has_memory_of_its_own_and_counts_on_one_rank(ranks: Any) -> None:
    for rank in ranks:
        items = rank["full", "mixed images"]
        assert all(item.untyped_storage().nbytes() == item.nbytes for item in items)
        assert len({item.untyped_storage().data_ptr() for item in items}) == len(items)
        assert not any(item.requires_grad for item in items)
    stats = [rank["full", "stats"] for rank in ranks]
    assert sum(counts.items for counts in stats) == 25
    # One image exceeds every budget.
    assert sum(counts.hits for counts in stats) >= 23
    assert all(sum(counts.misses.values()) + counts.hits == counts.items for counts in stats)


def test_one_failing_rank_raises_its_own_error_and_the_others_name_it(ranks: Any) -> None:
    for name in ("malformed on one", "no sizes on one"):
        for number, rank in enumerate(ranks):
            kind, message = rank[name]
            if number == FAILING_RANK:
                assert kind is InputError
                assert "_thw" in message
            else:
                assert kind is RankError
                assert message.startswith(f"rank {FAILING_RANK} could not encode its share of the items")


def test_different_inputs_are_the_same_error_on_every_rank(ranks: Any) -> None:
    kind, message = ranks[0]["other items on one"]
    assert kind is InputError
    assert message.startswith("the ranks were given different inputs")
    assert f"rank 0: 3 items, 104 patches; rank {FAILING_RANK}: 1 items, 16 patches" in message
    assert all(rank["other items on one"] == (kind, message) for rank in ranks)


def test_after_an_error_the_ranks_are_still_in_step(ranks: Any) -> None:
    expected = ranks[0]["after malformed on all"]
    assert [len(item) for item in expected] == [4, 16, 6]
    for rank in ranks:
        after = [result for name, result in rank.items() if str(name).startswith("after ")]
        assert len(after) == 4
        assert all(all(map(torch.equal, items, expected)) for items in after)


def test_real_rows_count_whatever_is_declared(ranks: Any) -> None:
    shares = assign_items([4 * n for n in ROWS], len(ranks))
    for rank in ranks:
        for extra in (-1, 2):
            items = rank[f"{extra} rows more"]
            assert [tuple(item.shape) for item in items] == [(n + extra, 3) for n in ROWS]
            assert all(item.eq(4 * n).all() for item, n in zip(items, ROWS, strict=True))
        assert [tuple(item.shape) for item in rank["no rows"]] == [(0, 3)] * 3
        lengths = [len(item) for item in rank["more rows on one"]]
        assert lengths == [n + (i in shares[FAILING_RANK]) for i, n in enumerate(ROWS)]


def test_a_rank_without_items_takes_columns_and_dtype_from_the_others(ranks: Any) -> None:
    for number, rank in enumerate(ranks):
        (item,) = rank["only item of other rows"]
        assert item.tolist() == [[7.0] * 3] * 5
        assert rank["only item of other rows: given"] == ([[(7, 2)]] if number == 0 else [])
        assert {item.dtype for item in rank["bfloat16"]} == {torch.bfloat16}
        assert [item[0, 0].item() for item in rank["bfloat16"]] == [4 * n for n in ROWS]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("three dimensions", "(rows, columns)"),
        ("int32", "torch.int32"),
        ("two widths", "this rank's items have 1 columns of torch.float32, 2 columns"),
        ("other dtype on one", f"rank {FAILING_RANK}: 3 of torch.float64"),
        ("costs of its own", "different costs"),
    ],
)
def test_items_that_cannot_be_exchanged_are_refused(name: str, expected: str, ranks: Any) -> None:
    for rank in ranks:
        kind, message = rank[name]
        assert kind is InputError and expected in message


@pytest.mark.parametrize(("name", "dear"), [("by cost", (12, 3)), ("rank 0's costs", (20, 5))])
def test_a_cost_model_or_what_rank_0_measured_decides_who_encodes_what(
    ranks: Any, name: str, dear: tuple[int, int]
) -> None:
    for number, rank in enumerate(ranks):
        (given_items,) = rank[f"{name}: given"]
        assert (given_items == [dear]) == (dear in given_items) == (number == 0)
        assert len(rank[name]) == 5


def test_a_rank_that_is_late_or_dead_is_an_error_within_the_timeout(ranks: Any) -> None:
    assert "dead" not in ranks[FAILING_RANK]
    for number, rank in enumerate(ranks):
        if number == FAILING_RANK:
            continue
        for name in ("late", "dead"):
            kind, message = rank[name]
            assert kind is RankError
            assert message.startswith(f"rank {number} of {len(ranks)} lost the others")
            assert f"within {SHORT}" in message
