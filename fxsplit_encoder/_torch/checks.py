"""What code tells a trace of its sizes."""

import torch

__all__ = ["check"]

check = torch._check
"""Tells a trace that a condition on sizes holds; outside of traces an assertion."""
