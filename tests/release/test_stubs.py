"""The stubs of the native module say what is in it, by mypy's stubtest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvweave

pytest.importorskip("mypy", reason="not installed: pip install mypy")

STUBS = (
    "_native.pyi",
    "_native_ops.pyi",
    "_native_store.pyi",
    "_native_virtual_pages.pyi",
)
# A signature of Rust shows a default that is no literal as an ellipsis: the stub says more of it.
# And PyO3 lists all names in `__all__`: nobody imports all of them.
MEANT = re.compile(
    r'runtime parameter "\w+" has a default value of Ellipsis, which is different'
    r"|^kvweave\._native\.__all__ is not present in stub$"
)


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """The stubs without the rest of the package, of which they need nothing: it takes a minute."""
    package = tmp_path / "kvweave"
    package.mkdir()
    (package / "__init__.pyi").touch()
    for name in STUBS:
        shutil.copy(Path(kvweave.__file__).with_name(name), package)
    return tmp_path


def differences(folder: Path) -> list[str]:
    """What stubtest complains of, a line each."""
    command = [sys.executable, "-m", "mypy.stubtest", "kvweave._native", "--concise"]
    package = Path(kvweave.__file__).parents[1]
    paths = {"MYPYPATH": str(folder), "PYTHONPATH": str(package), "MYPY_CACHE_DIR": os.devnull}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **paths}, capture_output=True, text=True
    )
    assert not done.stderr, done.stderr
    found = [line for line in done.stdout.splitlines() if not MEANT.search(line)]
    assert done.returncode in (0, 1), done.stdout
    return found


def test_stubs_are_what_is_there(alone: Path) -> None:
    assert differences(alone) == []


def test_a_stub_of_something_else_is_found(alone: Path) -> None:
    path = alone / "kvweave" / "_native.pyi"
    text = path.read_text(encoding="utf-8")
    path.write_text(text + "\ndef never_there() -> int: ...\n", encoding="utf-8")
    assert any("never_there" in line for line in differences(alone))
