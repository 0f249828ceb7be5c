"""A source distribution has what a wheel is built of, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

import pytest

pytest.importorskip("maturin", reason="not installed: pip install maturin")

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
BUDGET = 4 * MIB
TOP = {"Cargo.toml", "Cargo.lock", "pyproject.toml", "LICENSE", "README.md", "PKG-INFO"}
TOP |= {".rustfmt.toml", "rust", "python", "csrc"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "maturin", "sdist", "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.tar.gz")
    return made


def files(archive: Path) -> set[str]:
    """The files of an archive, without the folder that holds them."""
    with tarfile.open(archive) as opened:
        names = [member.name for member in opened.getmembers() if member.isfile()]
    return {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in names}


def tracked(*folders: str) -> set[str]:
    """What the repository has in some folders."""
    command = ["git", "ls-files", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_it_has_all_sources(sdist: Path) -> None:
    there = files(sdist)
    sources = tracked("python", "csrc")
    sources |= {name for name in tracked("rust") if "/src/" in name or name.endswith("build.rs")}
    assert sources - there == set()
    assert {"LICENSE", "rust/THIRD-PARTY-LICENSES.txt", "Cargo.lock", "pyproject.toml"} <= there


def test_it_has_nothing_else(sdist: Path) -> None:
    there = files(sdist)
    assert {PurePosixPath(name).parts[0] for name in there} <= TOP
    built = {".so", ".pyc", ".whl", ".cubin", ".fatbin", ".ptx"}
    assert not [name for name in there if PurePosixPath(name).suffix in built]
    assert not [name for name in there if "target" in PurePosixPath(name).parts]
    assert sdist.stat().st_size <= BUDGET


@pytest.mark.skipif("KVWEAVE_RELEASE" not in os.environ, reason="make release-check builds it")
def test_it_builds_without_kernels(sdist: Path, tmp_path: Path) -> None:
    """In an environment of its own, as pip would; what is built says why it has no kernels."""
    command = [sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--out-dir"]
    without = {**os.environ, "KVWEAVE_CUDA": "off"}
    done = subprocess.run(
        [*command, str(tmp_path), str(sdist)], env=without, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("kvweave-*.whl")
    said = (
        "import sys; sys.path.insert(0, sys.argv[1]); import kvweave; print(kvweave.cuda_status())"
    )
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, str(target), str(wheel)], check=True)
    shown = subprocess.run(
        [sys.executable, "-c", said, str(target)], cwd=tmp_path, capture_output=True, text=True
    )
    assert "built with KVWEAVE_CUDA=off" in shown.stdout, shown.stderr
