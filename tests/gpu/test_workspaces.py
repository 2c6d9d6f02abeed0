"""Captures beside code that has torch free the workspaces of cuBLAS, as `mode="reduce-overhead"` does.

In a process of its own: a graph that writes to memory of others leaves a process broken.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def test_nobody_else_gets_memory_that_graphs_write_to() -> None:
    cases = Path(__file__).with_name("workspace_cases.py")
    options = ["-q", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider", "-m", "gpu"]
    command = [sys.executable, "-m", "pytest", *options, str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "6 passed" in done.stdout
