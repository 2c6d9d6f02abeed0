from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.kernels.attention import AttentionShape
from fxsplit_encoder.kernels.meter import Measured
from fxsplit_encoder.kernels.store import (
    KernelStore,
    cache_directory,
    describe_environment,
    describe_host,
    digest_of,
)

from .attention.fakes import CUDA, shape

ENVIRONMENT = {"gpu": "H200", "packages": {"flash-attn-4": "4.0"}}

Table = dict[AttentionShape, Measured]


class Tables:
    """The tables of an operation in a store."""

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, Any] = ENVIRONMENT,
        shape: type[AttentionShape] = AttentionShape,
    ) -> None:
        self._shape = shape
        self.store = KernelStore("measured", environment, directory)
        self.path = self.store.directory / f"{shape.operation}.json"

    def load(self) -> Table:
        return self.store.read_table(self._shape, CUDA)

    def add(self, table: Table) -> None:
        self.store.add_to_table(table, self._shape, CUDA)


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


tables = st.dictionaries(
    st.builds(
        shape, st.integers(1, 10**6), st.integers(1, 99), st.integers(1, 9), host_lengths=st.booleans()
    ),
    st.builds(
        Measured,
        st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 1e5)),
        st.dictionaries(st.sampled_from("def"), st.text(max_size=9)),
    ),
    max_size=5,
)


@settings(max_examples=15)
@given(first=tables, second=tables)
def test_what_is_stored_is_loaded(
    first: Table, second: Table, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("cache")
    Tables(directory).add(first)
    Tables(directory).add(second)
    assert Tables(directory).load() == {**first, **second}
    assert Tables(directory, {**ENVIRONMENT, "gpu": "B200"}).load() == {}
    assert len(files(directory)) == 1  # no temporary file is left


def test_what_is_kept_depends_on_packages_on_the_name_of_their_folder_and_on_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As failures do: QuACK compiles epilogues only with packages in a folder of Python's usual name."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    driver = tmp_path / "version"
    monkeypatch.setattr("fxsplit_encoder.kernels.store._DRIVER", driver)
    found = [describe_host(CUDA)]
    for name, folder, version in (
        ("quack_kernels", "site", "1"),
        ("quack_kernels", "site-packages", "1"),
        ("apache_tvm_ffi", "site-packages", "1"),
        ("triton", "dist-packages", "1"),
    ):
        info = tmp_path / folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(info.parent)
        found.append(describe_host(CUDA))
    assert found[1]["packages"]["quack-kernels"] == "1, outside site-packages"
    assert found[2]["packages"]["quack-kernels"] == "1"
    driver.write_text("580.1\nGCC")
    found.append(describe_host(CUDA))
    assert found[-1]["driver"] == "580.1" and "driver" not in describe_environment(CUDA)
    assert len({digest_of(each) for each in found}) == len(found)


@dataclass(frozen=True, slots=True)
class OtherShape(AttentionShape):
    operation: ClassVar[str] = "another"


def test_operations_leave_each_other_alone(tmp_path: Path) -> None:
    other = Tables(tmp_path, shape=OtherShape)
    its: Table = {OtherShape(CUDA, torch.bfloat16, 1, 2, 3, 4, 5): Measured({"a": 2.0})}
    own = {shape(): Measured({"a": 1.0})}
    other.add(its)
    Tables(tmp_path).add(own)
    assert len(files(tmp_path)) == 2
    assert (Tables(tmp_path).load(), other.load()) == (own, its)
    assert Tables(tmp_path).load() == own


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"classes": [{}]}',
        '{"classes": [{"shape": {"dtype": "none"}}]}',
    ],
)
def test_a_table_of_other_content_is_a_warning_and_replaced(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Tables(tmp_path)
    kept.store.write("attention.json", content.encode())
    assert kept.load() == {}
    assert "what was measured of attention cannot be read" in caplog.text
    kept.add({shape(): Measured({"a": 1.0})})
    assert kept.load() == {shape(): Measured({"a": 1.0})}
    assert json.loads(kept.path.read_text().partition("\n")[2])["environment"] == ENVIRONMENT


@pytest.mark.parametrize("change", ["cut", "other", "emptied"])
def test_a_damaged_file_is_a_warning_and_replaced(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Tables(tmp_path)
    kept.add({shape(): Measured({"a": 1.0})})
    content = kept.path.read_bytes()
    kept.path.write_bytes({"cut": content[:-1], "other": content[:-1] + b"]", "emptied": b""}[change])
    assert kept.load() == {}
    assert f"{kept.path} is damaged" in caplog.text
    kept.add({shape(): Measured({"a": 2.0})})
    assert kept.load() == {shape(): Measured({"a": 2.0})}


def test_failures_are_not_kept_and_other_reasons_are(tmp_path: Path) -> None:
    found = Measured({"a": 1.0}, {"b": "error 1; allowed: 0.1", "c": "ImportError: no module"}, ["c"])
    Tables(tmp_path).add({shape(): found})
    assert Tables(tmp_path).load() == {shape(): Measured({"a": 1.0}, {"b": "error 1; allowed: 0.1"})}


def test_a_directory_that_others_can_write_is_neither_read_nor_written(tmp_path: Path) -> None:
    Tables(tmp_path).add({shape(): Measured({"a": 1.0})})
    Tables(tmp_path).store.directory.chmod(0o777)
    assert Tables(tmp_path).load() == {}
    with pytest.raises(OSError, match="others can write there"):
        Tables(tmp_path).store.write("one", b"")


def test_a_full_directory_takes_no_new_file_and_replaces_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelStore, "most_files", 1)
    store = KernelStore("any", ENVIRONMENT, tmp_path)
    for content in (b"1", b"2"):
        store.write("one", content)
        assert store.read("one") == content
    with pytest.raises(OSError, match="is full"):
        store.write("two", b"3")
    assert store.read("two") is None


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for step in range(20):
            Tables(tmp_path).add({shape(100 * number + step + 1): Measured({"a": 1.0})})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Tables(tmp_path).load()
    assert len(files(tmp_path)) == 1


def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    Tables(tmp_path / "file").add({shape(): Measured({"a": 1.0})})
    assert "not kept" in caplog.text


def test_the_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "fxsplit_encoder"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory() == Path.home() / ".cache" / "fxsplit_encoder"
