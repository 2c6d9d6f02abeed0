"""One encoder process as users start it: another interpreter."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from fxsplit_encoder.connector.processes import ProcessEncoder, ProcessOptions
from fxsplit_encoder.errors import EncoderLostError
from tests.connector.resources import nothing_left

from .conftest import DOUBLING, make_item


def socket_inodes(pid: int) -> set[str]:
    links = []
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
        except OSError:
            pass  # closed meanwhile
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:")}


def network_inodes(pid: int) -> set[str]:
    """Of every socket of a network that this process's namespace has."""
    tables = [Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")]
    rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    return {row[9] for row in rows}


def unix_inodes(pid: int) -> set[str]:
    rows = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
    return {row.split()[6] for row in rows}


@pytest.mark.slow
def test_a_process_of_its_own(short_path: Path) -> None:
    own_before = socket_inodes(os.getpid())
    options = ProcessOptions(
        max_bytes=1 << 20, runtime_directory=short_path, environment={"FXSPLIT_TEST": "1"}
    )
    encoder = ProcessEncoder(DOUBLING, options)
    with nothing_left():
        encoder.start()
        pid = encoder.pid
        assert pid is not None
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"FXSPLIT_TEST=1" in environment
        items = [make_item(rows) for rows in (100, 0, 7)]
        features = encoder.encode(items)
        assert all((f == 2 * i.inputs["pixel_values"]).all() for f, i in zip(features, items, strict=True))

        for process, others in ((pid, set()), (os.getpid(), own_before)):
            sockets, unix, network = socket_inodes(process) - others, unix_inodes(pid), network_inodes(pid)
            assert sockets
            assert not sockets & network
            assert sockets & socket_inodes(process) <= unix  # but for those that were just opened or closed
        for process in (pid, os.getpid()):
            assert "/dev/shm/" not in Path(f"/proc/{process}/maps").read_text()

        os.kill(pid, signal.SIGINT)  # a terminal sends it to both
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(0.2, kill)
        timer.start()
        with pytest.raises(EncoderLostError, match="SIGKILL"):
            encoder.encode([make_item(do="sleep", seconds=600)])
        timer.join()
        assert time.monotonic() - killed[0] < 60
        encoder.close()
    assert [path for path in short_path.rglob("*") if path.parent != short_path] == []
