"""A tower for another process of this user, without its weights: what its tensors look like, not what is in
them.
"""

from __future__ import annotations

import pickle
import types
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.transformers import collected_by, collects_outputs, output_hook
from fxsplit_encoder.errors import InputError

# Tensors of so many bytes are sent with their values: tables and counts that a forward's code may read.
_SMALL = 4096

_KINDS = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True)
class _Blank:
    """What a tensor looks like."""

    is_parameter: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    values: Tensor | None
    """On the CPU; None: zeros will do."""

    def make(self) -> Tensor:
        """One that looks like it."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()
        if self.values is not None:
            made.copy_(self.values)
        return nn.Parameter(made, self.requires_grad) if self.is_parameter else made


def dump(value: object) -> bytes:
    """A value with towers in it.

    Raises:
        InputError: another process cannot make it, and why.
    """
    blanks: list[_Blank] = []
    numbers: dict[int, int] = {}
    held: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, found: Any) -> int | None:
            if isinstance(found, type | types.FunctionType) and found.__module__ == "__main__":
                raise InputError(f"{found.__qualname__} is defined in the script that was started")
            if not isinstance(found, torch.Tensor):
                return None
            if id(found) not in numbers:
                numbers[id(found)] = len(blanks)
                blanks.append(_blank(found))
                held.append(found)  # while it lives its id is no other's
            return numbers[id(found)]

        def reducer_override(self, found: Any) -> Any:
            if isinstance(found, types.FunctionType) and collects_outputs(found):
                return output_hook, collected_by(found)
            return NotImplemented

    structure = BytesIO()
    try:
        Pickler(structure, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except InputError:
        raise
    except Exception as error:  # whatever an object's own code raises
        raise InputError(f"it cannot be pickled: {type(error).__name__}: {error}") from error
    return pickle.dumps((blanks, structure.getvalue()), protocol=pickle.HIGHEST_PROTOCOL)


def load(content: bytes) -> Any:
    """What `dump` was given, with zeros for weights."""
    blanks, structure = pickle.loads(content)
    made: list[Tensor] = [blank.make() for blank in blanks]

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> Tensor:
            return made[number]

    return Unpickler(BytesIO(structure)).load()


def _blank(tensor: Tensor) -> _Blank:
    if type(tensor) not in _KINDS:
        raise InputError(f"it holds a {type(tensor).__name__}, which is more than a tensor")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise InputError(f"it holds a tensor of layout {tensor.layout}")
    is_small = tensor.numel() * tensor.element_size() <= _SMALL and tensor.device.type != "meta"
    values = tensor.detach().cpu().clone() if is_small else None
    return _Blank(
        isinstance(tensor, nn.Parameter),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        str(tensor.device),
        tensor.requires_grad,
        values,
    )
