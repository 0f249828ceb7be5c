"""The benchmark of the store on disk, small, and what it reads beside."""

import shutil
from pathlib import Path

import pytest

from benchmarks.cases import store
from benchmarks.cases.store_peers import fio_seconds


def test_store_case_reads_what_was_put_and_opens_it_again() -> None:
    rows = store.run(quick=True)
    assert [row.unit for row in rows] == ["GB/s"] * 3 + ["ms"]
    assert all(row.value > 0 for row in rows)
    assert rows[0].of["of plain"] == rows[0].value / rows[1].value
    assert rows[0].of["path"] in ("direct", "refused")


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_reads_the_files_that_it_is_given(tmp_path: Path) -> None:
    files = [tmp_path / "a:b", tmp_path / "c"]
    for file in files:
        file.write_bytes(bytes(4 << 20))
    seconds = fio_seconds(files, 1 << 20, 4, 1)
    assert seconds is not None
    assert 0 < seconds < 60
