from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.kernels import Measured, MeasurementCache, cache_directory, describe_environment
from fxsplit_encoder.kernels.attention import AttentionShape
from fxsplit_encoder.kernels.store import describe_host, digest_of

from .attention.fakes import CUDA, shape

ENVIRONMENT = {"gpu": "H200", "packages": {"flash-attn-4": "4.0"}}

Table = dict[AttentionShape, Measured]


def cache(
    directory: Path, environment: Mapping[str, Any] = ENVIRONMENT, kernels: Sequence[str] = "abcdef"
) -> MeasurementCache[AttentionShape]:
    return MeasurementCache(environment, AttentionShape, kernels, directory)


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
    cache(directory).store(first, CUDA)
    cache(directory).store(second, CUDA)
    assert cache(directory).load(CUDA) == {**first, **second}
    assert cache(directory, {**ENVIRONMENT, "gpu": "B200"}).load(CUDA) == {}
    assert cache(directory, kernels="abc").load(CUDA) == {}  # there are other candidates
    assert len(list(directory.iterdir())) == 1  # no temporary file is left


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


def test_operations_share_a_file_and_leave_each_other_alone(tmp_path: Path) -> None:
    other = MeasurementCache(ENVIRONMENT, OtherShape, ["a"], tmp_path)
    its = {OtherShape(CUDA, torch.bfloat16, 1, 2, 3, 4, 5): Measured({"a": 2.0})}
    own = {shape(): Measured({"a": 1.0})}
    other.store(its, CUDA)
    cache(tmp_path).store(own, CUDA)
    assert len(list(tmp_path.iterdir())) == 1
    assert (cache(tmp_path).load(CUDA), other.load(CUDA)) == (own, its)
    assert MeasurementCache(ENVIRONMENT, OtherShape, ["b"], tmp_path).load(CUDA) == {}
    assert cache(tmp_path).load(CUDA) == own


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"operations": {"attention": 1}}',
        '{"operations": {"attention": {"kernels": ["a"]}}}',
        '{"operations": {"attention": {"kernels": ["a"], "classes": [{}]}}}',
        '{"operations": {"attention": {"kernels": ["a"], "classes": [{"shape": {"dtype": "none"}}]}}}',
        "\x00",
    ],
)
def test_a_broken_file_is_a_warning_and_replaced(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = cache(tmp_path, kernels="a")
    kept.path.write_text(content)
    assert kept.load(CUDA) == {}
    assert "attention is measured again" in caplog.text
    kept.store({shape(): Measured({"a": 1.0})}, CUDA)
    assert kept.load(CUDA) == {shape(): Measured({"a": 1.0})}
    assert json.loads(kept.path.read_text())["environment"] == ENVIRONMENT


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for step in range(20):
            table = {shape(100 * number + step + 1): Measured({"a": 1.0})}
            cache(tmp_path).store(table, CUDA)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache(tmp_path).load(CUDA)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache(tmp_path / "file").store({shape(): Measured({"a": 1.0})}, CUDA)
    assert "not kept" in caplog.text


def test_the_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "fxsplit_encoder"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory() == Path.home() / ".cache" / "fxsplit_encoder"
