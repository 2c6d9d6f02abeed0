from __future__ import annotations

from fxsplit_encoder.attention import KernelChooser, parse_attention
from fxsplit_encoder.attention.choice import Measurements
from fxsplit_encoder.kernels import KernelReport, Pin, describe, measuring

from ..attention.fakes import CUDA, FakeKernel, FakeMeter, shape


def test_a_report_says_what_was_measured_and_what_is_chosen_and_why_not() -> None:
    kernels = [
        FakeKernel("base"),
        FakeKernel("fast"),
        FakeKernel("wrong"),
        FakeKernel("gone", unavailable="no"),
    ]
    chooser = KernelChooser(measurements=Measurements(kernels, FakeMeter({"base": 9.0, "fast": 4.0})))
    with measuring():
        for tokens in (4096, 1024):
            chooser.ranking(shape(tokens))
    (condition,) = parse_attention({"tokens>=4096": "auto"})[0].conditions
    chooser.pins = (Pin((condition,), "base"),)
    report = describe(CUDA, chooser)
    small, large = (str(shape(tokens)) for tokens in (1024, 4096))
    assert small == "bfloat16 16x72, tokens 1024, longest 1024, segments 1, captured"
    assert report.kernels == (
        KernelReport("base", None, (large,)),
        KernelReport("fast", None, (small,)),
        KernelReport("wrong", None, ()),
        KernelReport("gone", "no", ()),
    )
    assert [(each.shape, each.chosen, each.pinned) for each in report.classes] == [
        (small, "fast", False),
        (large, "base", True),
    ]
    assert report.classes[0].microseconds == {"base": 9.0, "fast": 4.0}
    assert report.classes[0].rejected == {"wrong": "error 1; allowed: 0.1"}


def test_on_a_cpu_nothing_is_measured() -> None:
    report = describe(shape().device.__class__("cpu"), KernelChooser())
    assert report.classes == ()
    assert [each.name for each in report.kernels if each.unavailable is None] == [
        "batched_dense",
        "per_segment",
        "masked",
    ]
