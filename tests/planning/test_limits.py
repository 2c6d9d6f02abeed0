import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.planning.limits import Limits, default_budgets, generate_budgets, resolve_limits
from fxsplit_encoder.protocol import EncoderCudaGraphConfig, EncoderCudaGraphPathConfig

PATHS = {"global": EncoderCudaGraphPathConfig(272), "local": EncoderCudaGraphPathConfig(100, True)}

budget_lists = st.lists(st.integers(1, 5000), min_size=1, max_size=8, unique=True).map(sorted)


def tower(**values: Any) -> EncoderCudaGraphConfig:
    return EncoderCudaGraphConfig(["image", "video"], ["pixel_values"], 8, **values)


def limits(
    settings: dict[str, Any],
    budget_range: tuple[int, int] = (64, 4096),
    has_video: bool = True,
    **declared: Any,
) -> Limits:
    return resolve_limits(EncoderConfig(**settings), tower(**declared), budget_range, has_video)


def test_everything_is_inferred_from_the_range() -> None:
    assert limits({}, (64, 4096), max_frames_per_video=16) == Limits(
        {
            "default": (
                *range(64, 128, 16),
                *range(128, 256, 32),
                *range(256, 512, 64),
                *range(512, 1024, 128),
                *range(1024, 2048, 256),
                *range(2048, 4097, 512),
            )
        },
        64,
        1024,
    )


@pytest.mark.parametrize("budget_range", [(4096, 4096), (2049, 4096)])
def test_vllm_41714_a_narrow_range_does_not_make_batches_of_one(budget_range: tuple[int, int]) -> None:
    assert limits({}, budget_range).max_items_per_batch == 8
    assert limits({"token_budgets": [2, 4096]}, budget_range).max_items_per_batch == 2


def test_listed_budgets_hold_on_every_path_unless_it_lists_its_own() -> None:
    generated = limits({}, (64, 800), paths=PATHS)
    assert generated.path_budgets == {"global": (272, 544), "local": tuple(range(100, 801, 100))}
    everywhere = limits({"token_budgets": [10, 20]}, (64, 800), paths=PATHS)
    assert everywhere.path_budgets == {"global": (10, 20), "local": (10, 20)}
    one = {"paths": {"local": {"token_budgets": [30]}}}
    assert limits(one, (64, 800), paths=PATHS).path_budgets == {"global": (272, 544), "local": (30,)}
    both = limits({"token_budgets": [10, 20], **one}, (64, 800), paths=PATHS)
    assert both.path_budgets == {"global": (10, 20), "local": (30,)}


def test_budgets_of_a_path_with_a_minimum_of_its_own_are_whole_tiles() -> None:
    """As DeepSeek-OCR's: eight whole pages of 272 tokens, and crops of 100 in as many tokens."""
    found = limits({}, (272, 2176), paths=PATHS)
    assert found.path_budgets == {
        "global": tuple(272 * n for n in range(1, 9)),
        "local": tuple(100 * n for n in (*range(1, 9), 10, 12, 14, 16, 20, 21)),
    }
    many = limits({"max_items_per_batch": 150}, (272, 2176), paths=PATHS)
    assert many.path_budgets["local"] == (200, 300, 400, 500, 600, 700, *range(800, 1601, 200), 2000, 2100)
    assert many.max_items_per_batch == 150
    with pytest.raises(ConfigError, match=r"max_items_per_batch: .*'local'; allowed: 0 to 2100; got 2150"):
        limits({"max_items_per_batch": 2150}, (272, 2176), paths={"local": PATHS["local"]})


@given(st.integers(1, 400), st.integers(0, 4000), st.integers(0, 400))
def test_whole_tiles_hold_the_items_and_reach_the_range(tile: int, extra: int, items: int) -> None:
    maximum = tile + extra
    items = min(items, maximum - maximum % tile)
    paths = {"default": EncoderCudaGraphPathConfig(tile)}
    budgets = limits({"max_items_per_batch": items}, (1, maximum), paths=paths).path_budgets["default"]
    assert all(budget % tile == 0 for budget in budgets)
    assert max(items, tile) <= budgets[0] < items + tile + (items == 0)
    assert maximum - tile < budgets[-1] <= maximum


def test_a_listed_zero_is_never_captured() -> None:
    def with_local(budgets: list[int], **settings: Any) -> Limits:
        return limits({"paths": {"local": {"token_budgets": budgets}}, **settings}, (64, 800), paths=PATHS)

    assert with_local([0, 100, 200]).path_budgets["local"] == (100, 200)
    assert with_local([0, 100], max_items_per_batch=100).max_items_per_batch == 100
    with pytest.raises(ConfigError, match=r"max_items_per_batch: .*allowed: 0 to 100; got 101"):
        with_local([0, 100], max_items_per_batch=101)

    never = with_local([0], token_budgets=[300, 600])
    assert never.path_budgets == {"global": (300, 600), "local": ()}
    assert never.max_items_per_batch == 12
    with pytest.raises(ConfigError, match=r"paths\.global\.token_budgets: 0 is listed.*got \[0, 300\]"):
        limits({"paths": {"global": {"token_budgets": [0, 300]}}}, (64, 800), paths=PATHS)


def test_wrong_declarations_and_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"max_items_per_batch: .*allowed: 0 to 4096; got 5000"):
        limits({"max_items_per_batch": 5000}, (64, 4096))
    with pytest.raises(ConfigError, match=r"paths\.loca: the tower has no such path; allowed: global, local"):
        limits({"paths": {"loca": {}}}, paths=PATHS)
    with pytest.raises(InputError, match="declares no encoder path"):
        limits({}, paths={})
    with pytest.raises(InputError, match="1 <= minimum <= maximum; got 9, 8"):
        limits({}, (9, 8))
    with pytest.raises(
        InputError, match="'global' declares a smallest budget of 272 tokens; expected 1 to 256"
    ):
        limits({}, (64, 256), paths=PATHS)


@given(
    st.one_of(st.just([]), budget_lists),
    st.integers(0, 12),
    st.one_of(st.none(), st.integers(0, 50)),
    st.integers(1, 400),
    st.integers(0, 4000),
    st.integers(0, 32),
)
def test_limits_are_always_consistent(
    listed: list[int], items: int, frames: int | None, minimum: int, extra: int, video_frames: int
) -> None:
    items = min([items, *listed, minimum + extra])
    settings = {"token_budgets": listed, "max_items_per_batch": items, "max_frames_per_batch": frames}
    has_video = video_frames > 0
    found = limits(settings, (minimum, minimum + extra), has_video, max_frames_per_video=video_frames or 1)
    budgets = found.path_budgets["default"]
    assert list(budgets) == sorted(set(budgets))
    assert budgets == tuple(listed) or (not listed and budgets[-1] == minimum + extra)
    assert 1 <= found.max_items_per_batch <= budgets[0]
    assert items in (0, found.max_items_per_batch)
    expected = found.max_items_per_batch * video_frames if frames is None else frames
    assert found.max_frames_per_batch == (expected if has_video else 0)


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_generated_budgets_are_increasing_and_never_more_than_double(minimum: int, extra: int) -> None:
    budgets = generate_budgets(minimum, minimum + extra)
    assert (budgets[0], budgets[-1]) == (minimum, minimum + extra)
    assert budgets == sorted(set(budgets))
    assert all(budget == minimum << power for power, budget in enumerate(budgets[:-1]))
    assert all(larger <= 2 * smaller for smaller, larger in itertools.pairwise(budgets))


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_default_budgets_of_tiles_hold_whole_ones(tile: int, extra: int) -> None:
    budgets = default_budgets(tile, tile + extra, tile)
    assert (budgets[0], budgets[-1]) == (tile, tile + extra)
    assert budgets == sorted(set(budgets))
    assert set(generate_budgets(tile, tile + extra)) <= set(budgets)
    assert all(budget % tile == 0 for budget in budgets[:-1])
    assert all(4 * larger <= 5 * smaller for smaller, larger in itertools.pairwise(budgets[3:]))


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 8), (-1, 8), (9, 8)])
def test_impossible_ranges_are_refused(minimum: int, maximum: int) -> None:
    with pytest.raises(InputError, match=f"got minimum {minimum}, maximum {maximum}"):
        generate_budgets(minimum, maximum)
    with pytest.raises(InputError, match=f"got minimum {minimum}, maximum {maximum}"):
        default_budgets(minimum, maximum)
