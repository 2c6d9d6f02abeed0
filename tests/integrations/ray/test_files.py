"""Which files a run encodes, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.integrations.ray.files import checkpoint_digest, list_files, paths_digest, read_file

from ...models.checkpoints import save


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
    assert found == ["c.gif", "a/0.jpeg", "a/x/1.webp", "b/10.png", "b/2.JPG"]
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
        (str(tree / "nothing"), "no such file or directory"),
        (f"file://{tree}/nothing", "cannot be listed"),
        ("nosuch://bucket/x", "cannot be listed"),
    ):
        with pytest.raises(InputError, match=message):
            list_files([path])
    with pytest.raises(OSError, match="nothing"):
        read_file(f"file://{tree}/nothing")


def test_digests_tell_lists_and_checkpoints_apart(tmp_path: Path) -> None:
    assert paths_digest(["a", "b"]) != paths_digest(["ab"])
    assert paths_digest(["a", "b"]) != paths_digest(["b", "a"])
    _, directory = save(tmp_path / "model", "siglip")
    before = checkpoint_digest(str(directory))
    assert checkpoint_digest(str(directory)) == before
    (directory / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0]}', encoding="utf-8")
    changed = checkpoint_digest(str(directory))
    assert changed != before
    (directory / "model.safetensors").touch()
    assert checkpoint_digest(str(directory)) != changed
