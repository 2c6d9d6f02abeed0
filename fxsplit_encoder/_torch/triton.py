"""Triton's driver, for launching a kernel that was compiled before. Imported only where Triton is installed.

`kernel[grid](...)`, the public way, looks for the compiled version of a kernel at each call, which takes it
longer than the launch.
"""

from __future__ import annotations

from triton.runtime import driver

__all__ = ["driver"]
