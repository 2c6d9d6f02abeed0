from __future__ import annotations

from typing import Any

import pytest

from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.kernels.attention import KERNELS, AttentionShape
from fxsplit_encoder.kernels.attention.chooser import parse_attention

from .fakes import shape

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
    (pin,) = parse_attention({key: "masked"})
    assert [each for each in (WINDOWS, FRAMES, FRAME) if pin.holds(each)] == holds


def test_a_name_alone_is_for_every_shape() -> None:
    for name in ("auto", *(kernel.name for kernel in KERNELS)):
        (pin,) = parse_attention(name)
        assert pin.kernel == name
        assert pin.holds(WINDOWS)


def test_keys_keep_their_order() -> None:
    pins = parse_attention({"windowed": "torch_flash", "tokens<=9999": "auto", "full": "masked"})
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
        parse_attention(attention)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    expected = 2 if isinstance(attention, dict) and "full, ful" in attention else 1
    assert len(caught.value.problems) == expected
