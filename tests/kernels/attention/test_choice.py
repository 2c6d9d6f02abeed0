"""Which kernel is chosen: by shape alone, with kernels and times that are made up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxsplit_encoder as fx
from fxsplit_encoder.cli.inspection import class_rows, kernel_rows
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.kernels import choice
from fxsplit_encoder.kernels import kernel as kernels_base
from fxsplit_encoder.kernels.attention import KERNELS, AttentionShape, KernelChooser, KnownSegments
from fxsplit_encoder.kernels.attention.chooser import (
    Measurements,
    choosing,
    invariant_kernel,
    invariant_names,
    parse_pins,
)
from fxsplit_encoder.kernels.attention.op import attend
from fxsplit_encoder.kernels.choice import measuring
from fxsplit_encoder.kernels.meter import Measured
from fxsplit_encoder.kernels.store import KernelStore
from fxsplit_encoder.runtime.captured_program import Choosers

from ...manager.mock_towers import PathsOfTiles
from .fakes import CUDA, FakeKernel, FakeMeter, cumulative, shape, shapes

BASE = FakeKernel("base")
FAST = FakeKernel("fast", lambda shape: shape.head_dim == 72 and shape.longest >= 512)
DENSE = FakeKernel("dense", dense=True)
WRONG = FakeKernel("wrong")
MISSING = FakeKernel("missing", unavailable="not installed")
SLOW = FakeKernel("slow", last_resort=True)
EVERY = (BASE, FAST, DENSE, WRONG, MISSING, SLOW)
TIMES: dict[str, float | Callable[[AttentionShape], float]] = {
    "base": 10.0,
    "fast": lambda shape: 5.0 if shape.tokens > 1000 else 20.0,
    "dense": 3.0,
    "missing": 0.1,
    "slow": 0.1,
}


def make(*kernels: FakeKernel, **times: Any) -> tuple[KernelChooser, FakeMeter]:
    meter = FakeMeter(times or TIMES)
    return KernelChooser(measurements=Measurements(kernels or EVERY, meter)), meter


def chosen(chooser: KernelChooser, of: AttentionShape) -> str:
    return chooser.ranking(of)[0].name


@settings(max_examples=150)
@given(st.lists(shapes, min_size=1, max_size=8), st.integers(0, 8))
def test_what_is_chosen_supports_the_shape_is_there_and_is_accurate(
    of: list[AttentionShape], warm: int
) -> None:
    chooser, _ = make()
    with measuring():
        for each in of[:warm]:
            chooser.ranking(each)
    for each in of:
        for kernel in chooser.ranking(each):
            assert kernel.supports(each)
            assert kernel not in (MISSING, SLOW)
        if chooser.measurements.find(each) is not None:
            assert WRONG not in chooser.ranking(each)


def test_the_fastest_is_chosen_class_by_class() -> None:
    chooser, _ = make()
    with measuring():
        assert chosen(chooser, shape(2048)) == "fast"
        assert chosen(chooser, shape(600)) == "base"
        assert chosen(chooser, shape(2048, 64, 32)) == "base"  # the windowed layers of the same tower
        assert chosen(chooser, shape(4096, 1024, 4, host_lengths=True, equal=True)) == "dense"
        assert chosen(chooser, shape(4096, 1024, 4, host_lengths=True)) == "fast"


def test_every_number_of_tokens_is_a_class_where_a_kernel_depends_on_it() -> None:
    """Where it does not work, or for the host's segments, numbers are rounded as ever."""
    waves = FakeKernel("waves", lambda shape: shape.tokens < 5000 and not shape.host_lengths)
    waves.depends_on_tokens = True  # type: ignore[misc]
    times: Any = {"base": 10.0, "fast": 30.0, "waves": lambda shape: 5.0 if shape.tokens == 3136 else 20.0}
    chooser, meter = make(BASE, FAST, waves, **times)
    with measuring():
        assert chosen(chooser, shape(3136)) == "waves"
        assert chosen(chooser, shape(3137)) == "base"
        assert chosen(chooser, shape(3136)) == "waves"
        assert chosen(chooser, shape(7056)) == chosen(chooser, shape(7000)) == "base"
        assert chosen(chooser, shape(3136, host_lengths=True)) == "base"
    captured = [of.tokens for of, _ in meter.measured if not of.host_lengths]
    assert captured == [3136, 3137, 8192]
    # A size that was not measured gets the choice of the nearest.
    assert chosen(chooser, shape(3130)) == "waves"


def test_a_small_gain_does_not_replace_the_first_kernel() -> None:
    for microseconds, expected in ((9.6, "base"), (9.4, "fast")):
        chooser, _ = make(BASE, FAST, base=10.0, fast=microseconds)
        with measuring():
            assert chosen(chooser, shape()) == expected


def test_nothing_is_measured_outside_of_a_warm_up() -> None:
    chooser, meter = make()
    assert chosen(chooser, shape(2048)) == "base"
    assert meter.measured == []
    with measuring():
        assert chosen(chooser, shape(2048)) == "fast"
    assert len(meter.measured) == 1
    # The nearest class decides now, but not one that is far away or of another kind.
    assert chosen(chooser, shape(3000)) == "fast"
    assert chosen(chooser, shape(100_000)) == "base"
    assert chosen(chooser, shape(2048, host_lengths=True)) == "base"
    assert len(meter.measured) == 1


def test_where_nothing_else_works_last_resorts_are_used_and_never_measured() -> None:
    chooser, meter = make(FakeKernel("other", lambda shape: False), SLOW)
    with measuring():
        assert chosen(chooser, shape()) == "slow"
        assert meter.measured == []
        chooser, _ = make(WRONG, FakeKernel("worse"), base=1.0)
        assert chosen(chooser, shape()) == "wrong"  # none is accurate


def test_a_single_candidate_is_not_timed() -> None:
    chooser, meter = make(BASE)
    with measuring():
        for host_lengths in (False, True):
            chooser.ranking(shape(host_lengths=host_lengths))
    assert meter.measured == []


def test_known_segments_are_measured_for_several_of_them_at_once() -> None:
    chooser, meter = make()
    with measuring():
        chooser.ranking(shape(1024, host_lengths=True, equal=True))
    found = {(of.longest, of.segments, of.equal) for of, _ in meter.measured}
    assert found == {(1024 // n, n, equal) for n in (1, 4, 16) for equal in (False, True)}
    assert chosen(chooser, shape(700, 70, 10, host_lengths=True, equal=True)) == "dense"


def test_what_a_class_nearby_shows_to_be_beaten_is_not_compared() -> None:
    """A class of half the tokens differs by a factor of two in tokens and in the longest segment."""
    close, far = FakeKernel("close"), FakeKernel("far")
    chooser, meter = make(BASE, close, far, base=10.0, close=59.0, far=61.0)
    with measuring():
        for tokens in (4096, 2048, 256):
            chooser.ranking(shape(tokens))
    names = {of.tokens: names for of, names in meter.measured}
    assert names == {
        4096: ("base", "close", "far"),
        2048: ("base", "close"),
        256: ("base", "close", "far"),  # too far from where that was seen
    }
    found = chooser.measurements.table(CUDA)[shape(2048)]
    assert found.rejected == {"far": "far behind in a class nearby"}
    assert far not in chooser.ranking(shape(2048))
    chooser, meter = make(BASE, FAST, base=100.0, fast=1.0)  # the first candidate is always compared
    with measuring():
        for tokens in (4096, 2048):
            assert chosen(chooser, shape(tokens)) == "fast"
    assert [names for _, names in meter.measured] == [("base", "fast")] * 2


@settings(max_examples=100)
@given(st.lists(shapes, min_size=1, max_size=6), st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3))
def test_no_kernel_that_is_left_out_would_have_been_the_fastest(
    of: list[AttentionShape], growth: list[float]
) -> None:
    """Of kernels whose time grows with the work, each by a power of it between none and all."""

    def time(power: float) -> Callable[[AttentionShape], float]:
        return lambda shape: 10.0 * (shape.tokens * shape.longest * shape.segments / 1e6) ** power

    kernels = [FakeKernel(name) for name in ("base", "fast", "dense")]
    names = [kernel.name for kernel in kernels]
    times: Any = dict(zip(names, map(time, growth), strict=True))
    chooser, _ = make(*kernels, **times)
    with measuring():
        for each in of:
            chooser.ranking(each)
    for each, found in chooser.measurements.table(CUDA).items():
        assert min(times[name](each) for name in names) in found.microseconds.values()


@settings(max_examples=100)
@given(shapes)
def test_a_class_holds_its_shapes_and_is_its_own(of: AttentionShape) -> None:
    rounded = of.rounded()
    assert rounded.rounded() == rounded
    assert of.tokens <= rounded.tokens <= 4 * of.tokens
    assert of.segments <= rounded.segments < 2 * of.segments + 1
    assert of.longest <= rounded.longest <= rounded.tokens
    own = of.rounded(own_tokens=True)
    assert own.rounded(own_tokens=True) == own
    assert (own.tokens, own.segments) == (of.tokens, rounded.segments)
    assert own.longest <= own.tokens


def pinned(attention: str, measurements: Measurements | None = None) -> KernelChooser:
    return KernelChooser(attention, measurements or Measurements(EVERY, FakeMeter(TIMES)))


def test_a_pin_wins_over_what_is_faster(caplog: pytest.LogCaptureFixture) -> None:
    chooser = pinned("base")
    with measuring():
        assert chosen(chooser, shape(2048)) == "base"
    slow = pinned("slow")
    assert chosen(slow, shape(2048)) == "slow"
    fast = pinned("fast")
    assert chosen(fast, shape(2048)) == "fast"
    for _ in range(2):
        assert chosen(fast, shape(100)) == "base"
    assert [record.message for record in caplog.records] == [
        f"attention: fast is pinned but does not compute {shape(100)}; another kernel does"
    ]


def test_a_pinned_kernel_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="attention: missing cannot run on meta: not installed"):
        pinned("missing").check(CUDA)
    pinned("base").check(CUDA)
    with pytest.raises(ConfigError, match="attention: flash_attn_4 cannot run on cpu: needs CUDA"):
        KernelChooser("flash_attn_4").check(torch.device("cpu"))


def test_a_call_is_looked_up_once_until_something_new_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser, _ = make()
    query, cu = torch.empty(2048, 16, 72, device=CUDA, dtype=torch.bfloat16), cumulative([2048])
    assert chooser.of(query, cu, 2048) is BASE
    with monkeypatch.context() as patch:
        patch.setattr(chooser, "ranking", lambda shape: pytest.fail("looked up again"))
        assert chooser.of(query, cu, 2048) is BASE
    with measuring():
        assert chooser.of(query, cu, 2048) is FAST
    assert chooser.of(query, cu, 2048) is FAST
    monkeypatch.setattr(choice, "MOST_CALLS", 3)
    for rows in range(1, 20):
        chooser.of(query[:rows], cu, rows)
    assert len(chooser.by_call) <= 3


def test_what_plans_each_shape_is_for_captures() -> None:
    planning = FakeKernel("fast", plans=True)
    chooser = KernelChooser(
        measurements=Measurements([BASE, planning], FakeMeter({"base": 9.0, "fast": 1.0}))
    )
    query, cu = torch.empty(2048, 16, 72, device=CUDA, dtype=torch.bfloat16), cumulative([2048])
    with measuring():
        assert chooser.of(query, cu, 2048) is planning
    assert chooser.of(query, cu, 2048) is BASE
    chooser = pinned("fast", measurements=chooser.measurements)
    assert chooser.of(query, cu, 2048) is planning


def test_a_kernel_that_was_missing_is_compared_once_it_is_there(tmp_path: Any) -> None:
    def measured(unavailable: str | None) -> list[tuple[AttentionShape, tuple[str, ...]]]:
        kernels = BASE, FakeKernel("late", unavailable=unavailable)
        meter = FakeMeter({"base": 2, "late": 1})
        store = KernelStore("measured", {"gpu": "H"}, tmp_path)
        chooser = KernelChooser(measurements=Measurements(kernels, meter, lambda device: store))
        with measuring():
            for _ in range(2):
                assert chosen(chooser, shape(2048)) == ("base" if unavailable else "late")
        return meter.measured

    missing = "cannot import its package"
    assert measured(missing) == []  # there is nothing to compare
    other = KernelStore("measured", {"gpu": "H"}, tmp_path)
    other.add_to_table({shape(2048): Measured({"base": 2.0})}, AttentionShape, CUDA)
    assert measured(missing) == []
    assert measured(None) == [(shape(2048), ("base", "late"))]
    assert measured(None) == []


# --- pins


NAMES = [kernel.name for kernel in KERNELS]
WINDOWS, FRAMES, FRAME = shape(6272, 64, 98), shape(6272, segments=8), shape(6272, host_lengths=True)


@pytest.mark.parametrize(
    ("key", "holds"),
    [
        ("windowed", [WINDOWS]),
        ("full", [FRAMES, FRAME]),
        ("captured", [WINDOWS, FRAMES]),
        ("known", [FRAME]),
        ("tokens<=6272", [WINDOWS, FRAMES, FRAME]),
        ("tokens<6272", []),
        ("tokens > 6271, segments=1", [FRAME]),
        ("longest>=6272,captured", [FRAMES]),
        ("head_dim=72", [WINDOWS, FRAMES, FRAME]),
        ("head_dim=64", []),
    ],
)
def test_a_key_is_a_list_of_conditions(key: str, holds: list[AttentionShape]) -> None:
    (pin,) = parse_pins({key: "masked"}, NAMES)
    assert [each for each in (WINDOWS, FRAMES, FRAME) if pin.holds(each)] == holds


def test_a_name_alone_is_for_every_shape() -> None:
    for name in ("auto", *NAMES):
        (pin,) = parse_pins(name, NAMES)
        assert pin.kernel == name
        assert pin.holds(WINDOWS)


def test_keys_keep_their_order() -> None:
    pins = parse_pins({"windowed": "torch_flash", "tokens<=9999": "auto", "full": "masked"}, NAMES)
    assert [next(pin.kernel for pin in pins if pin.holds(each)) for each in (WINDOWS, FRAME)] == [
        "torch_flash",
        "auto",
    ]


@pytest.mark.parametrize(
    ("attention", "parts"),
    [
        ("fa4", ["attention: unknown", "allowed: auto, torch_flash", "got 'fa4'"]),
        ("flash_attn_3", ["attention: unknown; did you mean flash_attn_4", "allowed: auto, torch_flash"]),
        ("flash_attn4", ["did you mean flash_attn_4"]),
        ({"small": "masked"}, ["attention.small: unknown", "windowed, full", "tokens<=N", "got 'small'"]),
        ({"tokens<=many": "masked"}, ["attention.tokens<=many: unknown", "did you mean tokens<=N"]),
        ({"full, ful": "maskd"}, ["got 'maskd'", "did you mean masked", "did you mean full", "got 'ful'"]),
    ],
)
def test_what_is_unknown_is_named(attention: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pins(attention, NAMES)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    expected = 2 if isinstance(attention, dict) and "full, ful" in attention else 1
    assert len(caught.value.problems) == expected


# --- reports


def test_a_report_says_what_was_measured_and_what_is_chosen_and_why_not() -> None:
    kernels = [*map(FakeKernel, ("base", "fast", "wrong")), FakeKernel("gone", unavailable="no")]
    measurements = Measurements(kernels, FakeMeter({"base": 9.0, "fast": 4.0}))
    with measuring():
        for tokens in (4096, 1024):
            measurements.find(shape(tokens))
    chooser = KernelChooser({"tokens>=4096": "base"}, measurements)
    small, large = (str(shape(tokens)) for tokens in (1024, 4096))
    assert small == "bfloat16 16x72, tokens 1024, longest 1024, segments 1, captured"
    assert [tuple(row.values()) for row in kernel_rows(CUDA, chooser)] == [
        ("base", "works", 1),
        ("fast", "works", 1),
        ("wrong", "works", 0),
        ("gone", "no", 0),
    ]
    first, second = class_rows(CUDA, chooser)
    assert (first["shape"], first["chosen"], first["how"]) == (small, "fast", "measured")
    assert (second["shape"], second["chosen"], second["how"]) == (large, "base", "pinned")
    assert first["microseconds"] == {"base": 9.0, "fast": 4.0}
    assert chooser.measurements.table(CUDA)[shape(1024)].rejected == {"wrong": "error 1; allowed: 0.1"}


def test_what_raises_for_all_calls_of_a_kind_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what raises for one of several, or does not compute them, is not."""
    reasons = {
        "one": "TypeError: epilogue fn\ndepends on " + "x" * 500,
        "other": "TypeError: epilogue fn\ndepends on " + "x" * 500,
        "some": "RuntimeError: no tile",
        "wrong": "error 1; allowed: 0.1",
    }
    table = {
        shape(1024): Measured({"base": 9.0}, reasons, ["one", "other", "some"]),
        shape(2048): Measured({"base": 9.0, "some": 5.0}),
        shape(2048, host_lengths=True): Measured({"base": 9.0, "one": 5.0}),
    }
    kernels = [FakeKernel(name) for name in ("base", *reasons)]
    measurements = Measurements(kernels, FakeMeter({}))
    measurements.add(CUDA, table)
    choosers = Choosers(KernelChooser(measurements=measurements))
    (line,) = choosers.failures(CUDA)
    assert line.startswith("attention: one, other: TypeError: epilogue fn depends on") and len(line) < 200
    states = {row["kernel"]: row["state"] for row in kernel_rows(CUDA, choosers.attention)}
    assert [name for name, state in states.items() if state != "works"] == ["one", "other"]
    monkeypatch.setattr(Choosers, "of", classmethod(lambda cls, config: choosers))
    monkeypatch.setattr(measurements, "table", lambda device: table)
    manager = fx.EncoderCudaGraphManager(PathsOfTiles(), log_interval=0)
    assert line in manager.reports


# --- promised bits: one kernel attends everywhere, chosen by what it is


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = AttentionShape(GPU, torch.bfloat16, 16, 72, 3136, 3136, 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Devices of a compute capability on which some packages are installed."""

    def install(major: int, *packages: str) -> None:
        def find(module: str, attribute: str) -> tuple[Any, str | None]:
            return None, None if module.startswith(packages) else f"cannot import {module}"

        monkeypatch.setattr(kernels_base, "find", find)
        for name in ("kernel", "attention.flash_attn"):
            monkeypatch.setattr(f"fxsplit_encoder.kernels.{name}.capability", lambda _: (major, 0))

    return install


def test_the_order_of_kernels_and_the_device_decide(gpu: Any) -> None:
    gpu(9, "flash_attn.cute", "fxsplit_encoder")
    assert invariant_kernel(KERNELS, SHAPE).name == "flash_attn_4"
    assert invariant_names(KERNELS, GPU) == ["flash_attn_4", "torch_flash", "triton_64x64"]
    assert invariant_kernel(KERNELS, SHAPE, "triton_64x64").name == "triton_64x64"
    gpu(9)
    assert invariant_kernel(KERNELS, SHAPE).name == "torch_flash"
    gpu(10, "flash_attn.cute")
    assert invariant_kernel(KERNELS, SHAPE).name == "torch_flash"
    with pytest.raises(
        ConfigError, match="flash_attn_4: on this device its algorithm depends on the longest"
    ):
        invariant_kernel(KERNELS, SHAPE, "flash_attn_4")


def test_all_calls_with_the_same_heads_get_the_same_kernel(gpu: Any) -> None:
    gpu(9)
    chooser = KernelChooser(measurements=Measurements(), invariant=True)
    for tokens, segments, known, equal in itertools.product(
        (1, 700, 9999), (1, 40), (False, True), (False, True)
    ):
        shape = replace(SHAPE, tokens=tokens, segments=segments, host_lengths=known, equal=equal)
        assert [kernel.name for kernel in chooser.ranking(shape)] == ["torch_flash"]
    assert chooser.chosen == ["16x72 bfloat16: torch_flash"]


def test_heads_that_no_such_kernel_computes_are_refused(gpu: Any) -> None:
    gpu(9)
    with pytest.raises(
        ConfigError, match=r"no kernel attends to 16 heads of 72 in float32 on cuda:0 .*allowed: "
    ):
        invariant_kernel(KERNELS, replace(SHAPE, dtype=torch.float32))


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_a_segment_has_the_bits_that_it_gets_alone(
    lengths: list[int], dtype: torch.dtype, known: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths)
    q, k, v = torch.randn(tokens, 3, 2, 20, generator=generator).to(dtype).unbind(1)
    boundaries = [0, *itertools.accumulate(lengths)]
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    with choosing(KernelChooser(invariant=True)), measuring():
        if known:
            together = KnownSegments(cu_seqlens, boundaries).attend(q, k, v, 0.3)
        else:
            together = attend(q, k, v, cu_seqlens, tokens, 0.3)
        for start, end in itertools.pairwise(boundaries):
            alone = torch.tensor([0, end - start], dtype=torch.int32)
            own = (each[start:end].clone() for each in (q, k, v))
            if end > start:
                assert torch.equal(attend(*own, alone, end - start, 0.3), together[start:end])
