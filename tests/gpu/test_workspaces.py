"""Captures beside code that has torch free the workspaces of cuBLAS, as `mode="reduce-overhead"` does.

In a process of its own: streams of torch that other tests used have workspaces already, which it frees too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def test_nobody_else_gets_memory_that_graphs_write_to() -> None:
    cases = Path(__file__).with_name("workspace_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu"]
    done = subprocess.run([*command, str(cases)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "3 passed" in done.stdout
