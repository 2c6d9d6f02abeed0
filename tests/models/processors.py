"""What the processors of transformers that need torchvision compute, and images for them."""

from __future__ import annotations
import __future__

import ast
import importlib.util
import math
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_utils import SizeDict


def library(module: str, *names: str) -> dict[str, Any]:
    """Functions and classes of a module of transformers that cannot be imported without torchvision."""
    spec = importlib.util.find_spec(f"transformers.models.{module}")
    assert spec is not None and spec.origin is not None
    found: list[ast.stmt] = []
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            found.append(node)
        if isinstance(node, ast.ClassDef):
            found += [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in names]
    known = {"math": math, "np": np, "torch": torch, "SizeDict": SizeDict, "defaultdict": defaultdict}
    values: dict[str, Any] = {**known, "lru_cache": lru_cache}
    flags = __future__.annotations.compiler_flag  # types of what is not imported here
    exec(compile(ast.Module(found, []), spec.origin, "exec", flags=flags), values)
    return values


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
