"""The files of a run: whole or not there, of one run, written by one process at a time."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.errors import InputError, MediaError
from fxsplit_encoder.service.ray.encode_images import read_file
from fxsplit_encoder.service.ray.job import Parts, checkpoint_digest, list_files

from ...models.checkpoints import save

RUN = {"images": {"count": 6}, "settings": {"pooling": "none"}}


def table(shard: int) -> pa.Table:
    return pa.table(
        {
            "path": [f"{shard}a", f"{shard}b"],
            "layout": ["{}", None],
            "embedding": pa.array([[float(shard)], None], pa.large_list(pa.float32())),
            "error": pa.array([None, "no image"]),
        }
    )


def write(parts: Parts, *shards: int) -> None:
    for shard in shards:
        parts.write(shard, table(shard))


@settings(max_examples=20)
@given(st.permutations([0, 0, 1, 1, 2, 3, 4]), st.integers(0, 6))
def test_the_file_is_the_same_in_whatever_runs_its_parts_were_written(order: list[int], cut: int) -> None:
    """Some of them twice, as by two writers."""
    with tempfile.TemporaryDirectory() as directory:
        outputs = []
        for name, runs in (("whole", [list(range(5))]), ("cut", [order[:cut], order[cut:]])):
            for shards in runs:
                parts = Parts(Path(directory) / f"{name}.parquet", RUN, 5)
                with parts.opened():
                    write(parts, *shards)
                    if not parts.missing():
                        parts.finish()
            outputs.append(parts.output.read_bytes())
        assert outputs[0] == outputs[1]


def test_what_a_killed_process_left_half_written_does_not_count(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "x.parquet", RUN, 2)
    with parts.opened():
        write(parts, 0)
    left_over = parts.directory / ".k3x00000001.parquet"
    left_over.write_bytes(b"half")
    again = Parts(tmp_path / "x.parquet", RUN, 2)
    with again.opened():
        assert again.missing() == [1]
        assert not left_over.exists()


def test_a_process_killed_between_the_file_and_its_parts_leaves_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(tmp_path / "x.parquet", RUN, 1)
    with parts.opened(), monkeypatch.context() as patch:
        write(parts, 0)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        parts.finish()
    assert parts.missing() == [] and parts.directory.exists()
    parts.finish()
    assert not parts.directory.exists()


def test_parts_of_another_run_are_not_taken(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "x.parquet", RUN, 1)
    with parts.opened():
        write(parts, 0)
    other = Parts(tmp_path / "x.parquet", {**RUN, "settings": {"pooling": "mean"}}, 1)
    with (
        pytest.raises(InputError, match="of another run, which differs in settings; delete it"),
        other.opened(),
    ):
        pass
    with parts.opened():
        parts.finish()
    with pytest.raises(InputError, match="of another run"), other.opened():
        pass
    assert not other.directory.exists()
    (tmp_path / "y.parquet").write_bytes(b"something else")
    with pytest.raises(InputError, match="no Parquet file"):
        Parts(tmp_path / "y.parquet", RUN, 1).missing()
    pq.write_table(table(0), tmp_path / "z.parquet")
    with pytest.raises(InputError, match="differs in images, settings"):
        assert Parts(tmp_path / "z.parquet", RUN, 1).missing() == []


def test_a_directory_keeps_its_parts(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "out", RUN, 2)
    with parts.opened():
        write(parts, 0, 1)
        parts.finish()
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["00000000.parquet", "00000001.parquet"]
    assert Parts(tmp_path / "out", RUN, 2).missing() == []
    for name in ("00000000", "foreign"):
        (tmp_path / name).mkdir()
        pq.write_table(table(0), tmp_path / name / f"{name}.parquet")
        with pytest.raises(InputError, match="of another run"), Parts(tmp_path / name, RUN, 1).opened():
            pass


def hold(output: Path, entered: object, leave: object) -> None:
    with Parts(output, RUN, 1).opened():
        entered.set()  # type: ignore[attr-defined]
        leave.wait()  # type: ignore[attr-defined]


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    entered, leave = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path / "x.parquet", entered, leave))
    process.start()
    entered.wait()
    with pytest.raises(InputError, match="another process"), Parts(tmp_path / "x.parquet", RUN, 1).opened():
        pass
    leave.set()
    process.join()
    with Parts(tmp_path / "x.parquet", RUN, 1).opened():
        pass


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b/2.JPG", "b/10.png", "a/x/1.webp", "a/0.jpeg", "a/notes.txt", "c.gif"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_directories_are_searched_at_any_depth_in_order_of_name(tree: Path) -> None:
    found = [str(Path(path).relative_to(tree)) for path in list_files([str(tree)])]
    assert found == ["a/0.jpeg", "a/x/1.webp", "b/10.png", "b/2.JPG", "c.gif"]
    given = [str(tree / "a" / "notes.txt"), str(tree / "b")]
    assert list_files(given) == [given[0], str(tree / "b" / "10.png"), str(tree / "b" / "2.JPG")]


def test_uris_are_listed_by_pyarrow(tree: Path) -> None:
    found = list_files([f"file://{tree}/a", f"file://{tree}/c.gif"])
    assert found == [f"file://{tree}/a/0.jpeg", f"file://{tree}/a/x/1.webp", f"file://{tree}/c.gif"]
    assert read_file(found[0]) == b"a/0.jpeg"
    assert read_file(str(tree / "c.gif")) == b"c.gif"


def test_what_is_not_there_is_said(tree: Path) -> None:
    for path, message in (
        (str(tree / "empty"), "no image in this directory"),
        (str(tree / "nothing"), "cannot be listed"),
        (f"file://{tree}/nothing", "cannot be listed"),
        ("nosuch://bucket/x", "cannot be listed"),
    ):
        with pytest.raises(InputError, match=message):
            list_files([path])
    with pytest.raises(MediaError, match=r"cannot be read: .*nothing"):
        read_file(f"file://{tree}/nothing")


def test_digests_tell_checkpoints_apart(tmp_path: Path) -> None:
    _, directory = save(tmp_path / "model", "siglip")
    before = checkpoint_digest(str(directory))
    assert checkpoint_digest(str(directory)) == before
    (directory / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0]}', encoding="utf-8")
    changed = checkpoint_digest(str(directory))
    assert changed != before
    (directory / "model.safetensors").touch()
    assert checkpoint_digest(str(directory)) != changed
