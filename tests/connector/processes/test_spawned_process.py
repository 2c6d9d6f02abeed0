"""One encoder process as users start it: another interpreter, a checkpoint, a photograph."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.processes import ProcessOptions
from fxsplit_encoder.errors import EncoderLostError
from fxsplit_encoder.models.connectors import checkpoint_encoder, checkpoint_process, weightless_tower
from fxsplit_encoder.models.media import media_processor
from tests.connector.resources import nothing_left
from tests.models.checkpoints import save

ROOT = Path(__file__).parents[3]
PHOTOGRAPHS = sorted((ROOT / "examples" / "images").glob("*.jpg"))[:2]


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


def assert_local(pid: int, others: set[str]) -> None:
    """That every socket of a process is a Unix socket, and no shared memory of it has a name."""
    sockets, unix, network = socket_inodes(pid) - others, unix_inodes(pid), network_inodes(pid)
    assert sockets
    assert not sockets & network
    assert sockets & socket_inodes(pid) <= unix  # but for those that were just opened or closed
    named = [row for row in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in row]
    assert all(row.endswith("(deleted)") for row in named)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoint", "qwen2_5_vl")[1]


@pytest.fixture
def prepared(checkpoint: Path) -> list[PreparedItem]:
    processor = media_processor(weightless_tower(checkpoint), checkpoint)
    options = {"max_pixels": 64 * 28 * 28}
    items = [MediaItem("image", path, options) for path in PHOTOGRAPHS]
    return [processor.prepare(item) for item in items]


@pytest.mark.exhaustive
def test_a_tower_in_a_process_of_its_own(
    checkpoint: Path, prepared: list[PreparedItem], short_path: Path
) -> None:
    here = checkpoint_encoder(checkpoint)
    expected = here.encode(prepared)
    own_before = socket_inodes(os.getpid())
    options = ProcessOptions(
        max_bytes=1 << 22, runtime_directory=short_path, environment={"FXSPLIT_TEST": "1"}
    )
    with nothing_left():
        encoder = checkpoint_process(checkpoint, options=options)
        assert encoder.row_bytes("image") == here.row_bytes("image")
        encoder.start()
        pid = encoder.pid
        assert pid is not None
        assert b"FXSPLIT_TEST=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        os.kill(pid, signal.SIGINT)  # which a terminal sends to both
        for feature, other, item in zip(encoder.encode(prepared), expected, prepared, strict=True):
            assert feature.shape[0] == item.num_tokens
            torch.testing.assert_close(feature, other)
        assert_local(pid, set())
        assert_local(os.getpid(), own_before)

        os.kill(pid, signal.SIGSTOP)  # it has the batch in hand, and will not answer
        timer = threading.Timer(0.2, os.kill, [pid, signal.SIGKILL])
        timer.start()
        with pytest.raises(EncoderLostError, match="SIGKILL"):
            encoder.encode(prepared)
        timer.join()
        encoder.close()
    assert [path for path in short_path.rglob("*") if path.parent != short_path] == []
