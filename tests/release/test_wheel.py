"""A wheel that is to be released: `make release-check` builds it and says where it lies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bundled_licences as licences

FOLDER = os.environ.get("KVWEAVE_RELEASE")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="make release-check builds it")
MIB = 2**20
BUDGET, UNPACKED = 16 * MIB, 48 * MIB
OLDEST = (2, 28)
"""glibc of manylinux_2_28: Debian 10, Ubuntu 20.04, RHEL 8, and all later ones."""


@pytest.fixture(scope="module")
def wheel() -> Path:
    (made,) = Path(str(FOLDER)).glob("kvweave-*.whl")
    return made


def said(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> Path:
    """A program beside this interpreter."""
    return Path(sys.executable).with_name(name)


def test_its_name_says_abi3_and_manylinux_2_28(wheel: Path) -> None:
    assert re.fullmatch(r"kvweave-[\d.]+-cp310-abi3-manylinux_2_28_x86_64\.whl", wheel.name)


def test_auditwheel_finds_nothing_newer_in_it(wheel: Path) -> None:
    shown = " ".join(said(tool("auditwheel"), "show", wheel).split())
    found = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_x86_64"', shown)
    assert found is not None, shown
    assert (int(found[1]), int(found[2])) <= OLDEST


def test_it_keeps_to_the_stable_abi(wheel: Path) -> None:
    (looked,) = json.loads(said(tool("abi3audit"), "-R", "--strict", wheel))["specs"].values()
    (result,) = (module["result"] for module in looked["wheel"])
    assert result["is_abi3"]
    assert result["is_abi3_baseline_compatible"]


def test_its_size_is_within_the_budget(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        unpacked = sum(one.file_size for one in opened.infolist())
    assert wheel.stat().st_size <= BUDGET
    assert unpacked <= UNPACKED


def test_it_has_what_it_needs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        assert opened.testzip() is None
    known = {f"kvweave/{name}" for name in ("py.typed", "_native.pyi", "_native.abi3.so")}
    assert known <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"kvweave"}
    (about,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    for name in ("LICENSE", "rust/THIRD-PARTY-LICENSES.txt"):
        assert f"{about}/licenses/{name}" in names
    wanted = {".py", ".pyi", ".typed", ".so", ".json", ".txt", ""}
    assert {Path(name).suffix for name in names if ".dist-info/" not in name} <= wanted


def test_its_bill_of_materials_is_what_is_linked(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (one for one in opened.namelist() if one.endswith(".cyclonedx.json"))
        bill = json.loads(opened.read(name))
    listed = {(one["name"], one["version"]) for one in bill["components"]}
    assert {(crate.name, crate.version) for crate in licences.bundled()} <= listed


def test_it_works_where_nothing_else_is(wheel: Path, tmp_path: Path) -> None:
    """In a bare environment: with its dependencies, without torch, and with its kernels in it."""
    uv = [sys.executable, "-m", "uv"]
    python = tmp_path / "bare" / "bin" / "python"
    said(*uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "bare")
    said(*uv, "pip", "install", "--quiet", "--python", python, wheel)
    shown = said(python, "-I", "-c", "import kvweave; print(kvweave.cuda_status())")
    doctor = said(python, "-I", "-m", "kvweave", "doctor")
    assert re.search(r"cache, plans +works", doctor)
    assert "pip install 'kvweave[torch]'" in doctor
    assert python.with_name("kvweave").exists()
    assert "no kernels in this build" not in shown


def denied(*checks: str) -> subprocess.CompletedProcess[str]:
    command = ["cargo", "deny", "--config", str(licences.ALLOWED), "--all-features", "--locked"]
    command += ["check", *checks]
    return subprocess.run(command, cwd=licences.ROOT, capture_output=True, text=True)


def test_no_crate_is_forbidden() -> None:
    done = denied("licenses", "bans", "sources")
    assert done.returncode == 0, done.stderr
    assert "bans ok, licenses ok, sources ok" in done.stdout + done.stderr


def test_no_crate_is_known_to_be_vulnerable() -> None:
    """By RustSec's advisories; where their repository does not answer, that is said."""
    done = denied("advisories")
    if "failed to fetch advisory database" in done.stderr:
        pytest.skip("RustSec's advisories are out of reach")
    assert done.returncode == 0, done.stderr


def test_nothing_that_is_asked_for_is_known_to_be_vulnerable(tmp_path: Path) -> None:
    """By PyPI's advisories; where their service does not answer, that is said."""
    project = licences.ROOT / "pyproject.toml"
    wanted = tmp_path / "requirements.txt"
    resolve = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--output-file", wanted]
    said(*resolve, project, "--extra", "transformers", "--extra", "demo")
    audit = [tool("pip-audit"), "--disable-pip", "--no-deps", "--format", "json", "-r", wanted]
    done = subprocess.run(list(map(str, audit)), capture_output=True, text=True)
    listed = json.loads(done.stdout)["dependencies"] if done.stdout.startswith("{") else []
    known = {one["name"]: one["vulns"] for one in listed if "vulns" in one}
    if not known:
        pytest.skip("PyPI's advisories are out of reach")
    assert {"numpy", "torch", "transformers"} <= set(known)
    assert not {name: found for name, found in known.items() if found}
