from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.attention import cache
from fxsplit_encoder.attention.cache import MeasurementCache, cache_directory
from fxsplit_encoder.attention.measure import Measured

from .fakes import CUDA, shape

ENVIRONMENT = {"gpu": "H200", "packages": {"flash-attn-4": "4.0"}}

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
    first: cache.Table, second: cache.Table, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("cache")
    MeasurementCache(ENVIRONMENT, directory).store(first, CUDA)
    MeasurementCache(ENVIRONMENT, directory).store(second, CUDA)
    assert MeasurementCache(ENVIRONMENT, directory).load(CUDA) == {**first, **second}
    assert MeasurementCache({**ENVIRONMENT, "gpu": "B200"}, directory).load(CUDA) == {}
    assert len(list(directory.iterdir())) == 1  # no temporary file is left


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"classes": [{}]}',
        '{"classes": [{"shape": {"dtype": "none"}, "measured": {}}]}',
        "\x00",
    ],
)
def test_a_broken_file_is_a_warning_and_replaced(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = MeasurementCache(ENVIRONMENT, tmp_path)
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
            MeasurementCache(ENVIRONMENT, tmp_path).store(table, CUDA)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert MeasurementCache(ENVIRONMENT, tmp_path).load(CUDA)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    MeasurementCache(ENVIRONMENT, tmp_path / "file").store({shape(): Measured({"a": 1.0})}, CUDA)
    assert "not kept" in caplog.text


def test_the_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "fxsplit_encoder"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory() == Path.home() / ".cache" / "fxsplit_encoder"
