from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable

import pytest

from fxsplit_encoder.connector.transport.arena import OwnArena, adopt
from fxsplit_encoder.errors import InputError, TransportError
from tests.connector.resources import mapped_bytes, nothing_left, num_descriptors

MIB = 1 << 20


def test_memory_is_taken_by_what_was_written_and_given_back() -> None:
    own = OwnArena(1 << 30)
    assert own.resident_bytes == 0
    own.view(0, 8 * MIB).fill_(1)
    assert own.resident_bytes >= 8 * MIB
    own.drop_pages(2 * MIB + 1, 6 * MIB - 1)
    assert own.resident_bytes <= 2 * MIB + mmap.PAGESIZE
    assert own.view(2 * MIB, 1).item() == 1  # only whole pages go
    assert own.view(3 * MIB, 1).item() == 0
    own.drop_pages(0, 0)
    own.drop_pages(10, -5)
    own.close()
    assert own.resident_bytes == 0


def test_a_view_outlives_its_arena_and_then_the_memory_goes() -> None:
    with nothing_left():
        own = OwnArena(MIB)
        view = own.view(0, 4)
        own.close()
        own.close()
        with pytest.raises(TransportError, match="closed"):
            own.view(0, 1)
        view.fill_(3)
        assert mapped_bytes() >= MIB
        del view


def sparse_file(path: str) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, MIB)
    return descriptor


def unsealed(path: str) -> int:
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, MIB)
    return descriptor


def partly_sealed(path: str) -> int:
    descriptor = unsealed(path)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return descriptor


def smaller(path: str) -> int:
    own = OwnArena(MIB // 2)
    descriptor = os.dup(own.descriptor)
    own.close()
    return descriptor


@pytest.mark.parametrize(
    "make", [sparse_file, unsealed, partly_sealed, smaller, lambda path: os.open("/dev/null", os.O_RDWR)]
)
def test_only_sealed_memory_of_the_size_that_was_said_is_mapped(
    make: Callable[[str], int], tmp_path: object
) -> None:
    before = num_descriptors()
    with pytest.raises(TransportError):
        adopt(make(f"{tmp_path}/file"), MIB)
    assert num_descriptors() == before


def test_the_size_cannot_be_changed() -> None:
    own = OwnArena(MIB)
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(own.descriptor, size)
    own.close()


@pytest.mark.parametrize("size", [1 << 62, 1 << 80, -4096, 0])
def test_a_size_that_cannot_be_is_an_error(size: int) -> None:
    before = num_descriptors()
    with pytest.raises(InputError, match="max_bytes"):
        OwnArena(size)
    assert num_descriptors() == before
