"""2,000 photographs on a cluster of two encoding actors: whole, interrupted, and cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.service.encoder import QueuedEncoder
from fxsplit_encoder.service.ray import EncodeJob

from ...waiting import wait_until
from ..photographs import settings_of
from .conftest import STORE_BYTES
from .processes import descendants, named, private_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHARD = 64
ACTOR = "ray::MapWorker"


def job_of(photographs: Path, output: Path, model: Path, **settings: Any) -> EncodeJob:
    return EncodeJob([str(photographs)], output, settings_of(model, **settings), shard_size=SHARD, workers=2)


class Watched:
    """Runs beside a run: memory of the largest actor and of the largest process of the node, without what
    they share, and something that is done once so many shards are written."""

    def __init__(self, parts: Path, shards: int = 0, act: Callable[[], None] | None = None) -> None:
        self.actor_bytes: list[int] = []
        self.process_bytes: list[int] = []
        self.spilled = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(parts, shards, act))

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self, parts: Path, shards: int, act: Callable[[], None] | None) -> None:
        while not self._done.wait(0.2):
            written = len(list(parts.glob("0*.parquet")))
            if act is not None and written >= shards:
                act()
                act = None
            if written >= 2:
                self.actor_bytes.append(max(map(private_bytes, named(ACTOR)), default=0))
                self.process_bytes.append(max(map(private_bytes, descendants()), default=0))
            spilled = Path("/tmp/ray/session_latest").rglob("ray_spilled_objects*/*")
            self.spilled = max(self.spilled, sum(path.stat().st_size for path in spilled if path.is_file()))


@pytest.fixture(scope="module")
def whole(cluster: Any, photographs: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that nothing happens to."""
    output = tmp_path_factory.mktemp("whole") / "embeddings.parquet"
    job = job_of(photographs, output, model)
    seen: list[tuple[int, int]] = []
    begin = time.monotonic()
    with Watched(job.parts.directory) as watched:
        outcome = job.run(lambda done, total: seen.append((done, total)))
    print(f"2,000 images in {time.monotonic() - begin:.0f} s")
    assert (outcome.images, outcome.written_before, outcome.failed) == (2000, 0, 8)
    assert seen[0] == (0, 2000)
    assert seen[-1] == (2000, 2000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    check_memory(watched)
    return output


def check_memory(watched: Watched) -> None:
    """The pixels of all images are three times Ray's shared memory, and hardly any of it went to disk, as it
    does where the machine is busy; no actor and no other process holds more at the end than when it was warm.
    """
    assert 2000 * 3 * 224 * 224 > 2.5 * STORE_BYTES
    print(f"{watched.spilled >> 10} KiB were spilled")
    assert watched.spilled < STORE_BYTES // 20
    for name, samples in (("an actor", watched.actor_bytes), ("a process", watched.process_bytes)):
        assert len(samples) >= 4
        early, late = samples[: len(samples) // 2], samples[len(samples) // 2 :]
        print(f"{name}: {max(early) >> 20} MiB early, {max(late) >> 20} MiB late")
        assert max(late) < max(early) + (64 << 20)


def test_every_image_is_there_once_and_in_order(whole: Path, photographs: Path, model: Path) -> None:
    table = pq.read_table(whole)
    paths = [str(photographs / f"{n // 1000}" / f"{n:04}.jpg") for n in range(2000)]
    assert table["path"].to_pylist() == paths
    errors = {n: error for n, error in enumerate(table["error"].to_pylist()) if error}
    assert sorted(errors) == list(range(249, 2000, 250))
    assert all("cannot be read as an image" in error for error in errors.values())
    assert not whole.with_name("embeddings.parquet.parts").exists()


def test_embeddings_are_the_managers(whole: Path, photographs: Path, model: Path) -> None:
    encoder = QueuedEncoder(settings_of(model))
    for row in pq.read_table(whole).slice(SHARD * 3, SHARD).to_pylist():
        if row["error"]:
            assert row["embedding"] is None
            continue
        prepared = encoder.preparer.load(Path(row["path"]).read_bytes())
        (expected,) = encoder.encode([prepared])
        assert isinstance(expected, np.ndarray)
        assert (row["tokens"], row["width"], row["layout"]) == (*expected.shape, '{"tiles": 1}')
        found = np.array(row["embedding"], np.float32).reshape(row["tokens"], row["width"])
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_an_actor_is_killed_in_the_middle(
    whole: Path, cluster: Any, photographs: Path, model: Path, tmp_path: Path
) -> None:
    job = job_of(photographs, tmp_path / "embeddings.parquet", model)
    killed: list[int] = []

    def kill() -> None:
        killed.append(named(ACTOR)[0])
        os.kill(killed[0], signal.SIGKILL)

    with Watched(job.parts.directory, 4, kill):
        outcome = job.run()
    assert killed
    assert (outcome.images, outcome.failed) == (2000, 8)
    assert job.parts.output.read_bytes() == whole.read_bytes()


def test_a_run_is_cut_off_and_resumed(whole: Path, photographs: Path, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("enabled: false\n", encoding="utf-8")
    output = tmp_path / "embeddings.parquet"
    parts = output.with_name("embeddings.parquet.parts")
    command = [sys.executable, "-m", "fxsplit_encoder.cli.main", "encode", str(photographs), "--ray"]
    command += ["--model", str(model), "--output", str(output), "--config", str(config)]
    command += ["--shard-size", str(SHARD), "--workers", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        wait_until(lambda: len(list(parts.glob("0*.parquet"))) >= 5 or first.poll() is not None)
        assert first.poll() is None, (tmp_path / "log").read_text()
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert not output.exists()
    written = {path: path.stat().st_mtime_ns for path in sorted(parts.glob("0*.parquet"))}
    second = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_until(lambda: len(list(parts.glob("0*.parquet"))) > len(written) or second.poll() is not None)
    now = {path: path.stat().st_mtime_ns for path in written if path.exists()}
    text, _ = second.communicate()
    assert second.returncode == 0, text
    assert now == written
    images = next(line for line in text.splitlines() if line.startswith("images"))
    assert int(images.split("of which ")[1].split()[0]) >= 5 * SHARD
    for stage in ("prepare_images", "EncodeImages", "write_shard"):
        assert f"MapBatches({stage}): " in text
    assert output.read_bytes() == whole.read_bytes()
    assert not parts.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard_size": 0}, "shard_size"),
        ({"workers": 0}, "workers"),
        ({"paths": ["/nowhere"]}, "cannot be listed"),
        ({"paths": []}, "at least one path"),
        ({"output": Path("/nowhere/x.parquet")}, "no such directory"),
        ({"workers": 4}, "one more prepares"),
        ({"model": "/nowhere"}, "no such directory"),
    ],
)
def test_what_cannot_be_is_said_first(
    cluster: Any, photographs: Path, model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    given = {"paths": [str(photographs)], "output": tmp_path / "x.parquet", **changes}
    settings = settings_of(given.pop("model", model))
    with pytest.raises((ConfigError, InputError), match=message):
        EncodeJob(given.pop("paths"), given.pop("output"), settings, **given).run()
