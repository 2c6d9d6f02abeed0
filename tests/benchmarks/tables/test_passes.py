from __future__ import annotations

from typing import Any

from tables.passes import fastest_products, marked_products, marked_replays, products, replays

from ..conftest import ENVIRONMENT
from .cells import cells


def test_a_candidate_that_failed_keeps_its_row() -> None:
    measured = {"candidate": "default", "196": 1.5, "784": 2.25, "error": 0.005, "derived MiB": 0.0}
    header, default, failed = cells(replays([measured, {"candidate": "fp8", "failed": "no device"}]))
    assert header == ["candidate", "196", "784", "error", "derived MiB", "failed"]
    assert default == ["default", "1.50", "2.25", "0.00500", "0.00", "-"]
    assert failed == ["fp8", "-", "-", "-", "-", "no device"]
    assert "failed" not in replays([measured])


def product(layer: str, way: str, us: float) -> dict[str, Any]:
    return {"layer": layer, "rows": 196, "way": way, "us": us, "TFLOP/s": 1.0, "GB/s": 1.0}


PRODUCTS = [
    product("qkv", "default", 10.0),
    product("qkv", "cublas", 8.0),
    product("qkv", "fp8 with its rows", 5.0),
    {"layer": "qkv", "rows": 196, "way": "cublaslt", "failed": "not there"},
    product("fc1", "default", 4.0),
    product("fc1", "default, then gelu", 9.0),
    product("fc1", "gelu epilogue", 7.0),
]


def test_the_fastest_way_computes_the_same_in_bf16() -> None:
    _, qkv, fc1 = cells(fastest_products(PRODUCTS))
    assert qkv == ["qkv", "196", "10.0", "cublas", "8.00", "5.00"]
    assert fc1 == ["fc1", "196", "9.00", "gelu epilogue", "7.00", "-"]
    (nothing,) = cells(fastest_products(PRODUCTS[3:4]))[1:]
    assert nothing == ["qkv", "196", "-", "-", "-", "-"]
    assert len(cells(products(PRODUCTS))) == 1 + len(PRODUCTS)


def test_a_part_that_did_not_run_has_no_table() -> None:
    stored = {**ENVIRONMENT, "replays": [{"candidate": "default", "196": 1.0}], "products": []}
    text = marked_replays(stored)
    assert text is not None and "NVIDIA H200, driver 580" in text
    assert marked_products(stored) is None
