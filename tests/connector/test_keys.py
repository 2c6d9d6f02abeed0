from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.connector.keys import (
    HashName,
    TowerIdentity,
    canonical,
    digest_of,
    feature_key,
    item_digest,
    precision_of,
    weights_digest,
)
from fxsplit_encoder.errors import InputError, MissingExtraError

BOTH: tuple[HashName, ...] = ("blake3", "sha256")


class Resample(IntEnum):
    BICUBIC = 3


@pytest.mark.parametrize("name", BOTH)
def test_a_digest_has_32_bytes_and_tells_where_parts_end(name: HashName) -> None:
    parts = ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""], [])
    digests = [digest_of(part, name) for part in parts]
    assert {len(digest) for digest in digests} == {32}
    assert len(set(digests)) == len(parts)
    assert digest_of([bytearray(b"ab"), memoryview(b"c")], name) == digests[0]


def test_the_functions_differ_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert digest_of([b"a"]) == digest_of([b"a"], "blake3") != digest_of([b"a"], "sha256")
    with pytest.raises(InputError, match="hash: expected blake3 or sha256; got 'md5'"):
        digest_of([b"a"], "md5")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(MissingExtraError, match="connector"):
        digest_of([b"a"])
    assert len(digest_of([b"a"], "sha256")) == 32


settings_of = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), settings_of, max_size=4))
@settings(max_examples=25)
def test_the_order_of_names_does_not_matter(settings: dict[str, object]) -> None:
    assert canonical(settings) == canonical(dict(reversed(settings.items())))


def test_different_settings_are_different_bytes() -> None:
    values = [
        None,
        1,
        1.5,
        "1",
        True,
        [1],
        {"1": 1},
        {1: 1},
        b"1",
        torch.float16,
        np.zeros(1),
        np.zeros(1, int),
    ]
    assert len({canonical(value) for value in values}) == len(values)
    assert canonical((1, 2)) == canonical([1, 2]) == canonical([np.int64(1), 2])
    assert canonical(Resample.BICUBIC) == canonical(3)


@pytest.mark.parametrize("value", [object(), {1: 2, "a": 3}, [lambda: None], {"a": {2}}])
def test_what_has_no_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="options"):
        canonical(value)


def test_an_items_digest_covers_media_processor_and_options() -> None:
    same = (b"m" * 32, b"p" * 32, {"max_pixels": 1})
    changed = [(b"n" * 32, *same[1:]), (same[0], b"q" * 32, same[2]), (*same[:2], {"max_pixels": 2})]
    assert len({item_digest(*case) for case in [same, *changed]}) == 4
    assert item_digest(*same) == item_digest(*same)


def module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize("most_bytes", [1 << 28, 16], ids=["whole", "in pieces"])
def test_a_towers_weights_are_part_of_its_identity(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxsplit_encoder.connector.keys._MOST_TENSOR_BYTES", most_bytes)
    made: Any = module()
    before = weights_digest(made)
    assert before == weights_digest(module()) == weights_digest(module().requires_grad_(False))
    made[0].weight.data[0, 0] += 1
    changed = weights_digest(made)
    made[1].running_mean += 1
    assert len({before, changed, weights_digest(made)}) == 3


def test_weights_of_16_bits_and_views_have_a_digest_and_meta_tensors_none() -> None:
    half = module().to(torch.bfloat16)
    assert weights_digest(half) != weights_digest(module())
    transposed = nn.Linear(4, 4)
    transposed.weight.data = transposed.weight.data.T
    assert len(weights_digest(transposed)) == 32
    with pytest.raises(InputError, match=r"0\.bias: expected weights; got a tensor on the meta device"):
        weights_digest(module().to("meta"))


def test_a_features_key_covers_tower_and_salt() -> None:
    tower = TowerIdentity.of(module(), "")
    assert tower.dtype == "torch.float32"
    others = [
        feature_key(b"i" * 32, tower),
        feature_key(b"j" * 32, tower),
        feature_key(b"i" * 32, tower, salt="tenant"),
        feature_key(b"i" * 32, TowerIdentity.of(module(1), "")),
        feature_key(b"i" * 32, TowerIdentity.of(module(), "invariant")),
        feature_key(b"i" * 32, TowerIdentity(tower.weights, "torch.bfloat16", "")),
    ]
    assert len(set(others)) == len(others)
    assert others[0] == feature_key(b"i" * 32, TowerIdentity.of(module(), ""))


def test_features_with_promised_bits_are_apart_from_others() -> None:
    settings = ({}, {"invariant": True})
    assert [precision_of(EncoderConfig(**each)) for each in settings] == ["", "invariant"]
