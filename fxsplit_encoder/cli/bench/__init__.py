"""`encoder-cg bench`: what a user would gain on a GPU with images of their own."""

from fxsplit_encoder.cli.bench.run import run_bench
from fxsplit_encoder.cli.bench.ways import WAYS
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import nearest

__all__ = ["WAYS", "check_ways", "run_bench"]


def check_ways(listed: str) -> list[str]:
    """The names in a list with commas between them, in the order in which they run.

    Raises:
        InputError: one of them is none, or there are none.
    """
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for name in names or [listed]:
        if name not in WAYS:
            asked = nearest(name, list(WAYS))
            raise InputError(f"--ways {name}: no such way; {asked}expected some of {', '.join(WAYS)}")
    return [name for name in WAYS if name in names]
