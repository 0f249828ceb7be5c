"""vLLM's own tests, with the plugin registered and without: the same ones must fail.

`python -m benchmarks.vllm.own_tests [--source FOLDER] [PATHS…]` runs the tests that touch what the
plugin registers (attention backends, block tables, prefix caching, KV connectors) from vLLM's
source distribution, of the version that is installed, twice: with no plugin, and with ours loaded
before any test. What became of another in the two runs is listed, and the exit status is 1 then.
Without FOLDER the source comes from the package index, by pip.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

PATHS = (
    "tests/v1/attention/test_attention_backends.py",
    "tests/v1/attention/test_attention_splitting.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_kv_cache_metrics.py",
    "tests/v1/core/test_kv_cache_utils.py",
    "tests/v1/core/test_prefix_caching.py",
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_single_type_kv_cache_manager.py",
    "tests/v1/kv_connector/unit/test_cache_pollution_prevention.py",
    "tests/v1/kv_connector/unit/test_error_propagation.py",
    "tests/v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "tests/v1/kv_connector/unit/test_kv_connector_lifecycle.py",
    "tests/v1/kv_connector/unit/test_multi_connector.py",
    "tests/v1/kv_connector/unit/test_scheduler_kv_connector_override.py",
    "tests/v1/worker/test_gpu_block_table.py",
)
"""Those that a version does not have are left out, and said."""
PLUGINS = {"without": "", "with": "kvweave"}
TOOLS = ("setuptools-scm", "setuptools-rust", "packaging")
Outcomes = dict[str, str]
"""What became of each test: `passed`, `failed`, `error` or `skipped`."""


def downloaded(folder: Path, wanted: str) -> Path:
    """The unpacked source distribution of a version of vLLM."""
    tools = folder / "tools"
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "--target", str(tools), *TOOLS], check=True)
    # Its metadata is made before it is handed out; nothing is built.
    env = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": wanted}
    paths = [str(tools), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths)}
    words = ["download", "--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
    subprocess.run([*pip, *words, f"vllm=={wanted}", "-d", str(folder)], check=True, env=env)
    (archive,) = folder.glob("vllm-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def outcomes_of(report: Path) -> Outcomes:
    """What a JUnit report of pytest says of each test."""
    found: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
        found[name] = next((kinds[part.tag] for part in case if part.tag in kinds), "passed")
    return found


def ran(source: Path, paths: list[str], plugins: str, report: Path, limit_s: float) -> Outcomes:
    """What became of the tests with the plugins of this list."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no"]
    words += ["-p", "benchmarks.vllm.registered", f"--junitxml={report}", "--rootdir", str(source)]
    here = Path(__file__).resolve().parents[2]
    known = [str(here), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env = {**os.environ, "VLLM_PLUGINS": plugins, "PYTHONPATH": os.pathsep.join(known)}
    subprocess.run([*words, *paths], cwd=source, env=env, timeout=limit_s, check=False)
    if not report.exists():
        raise RuntimeError(f"pytest: expected a report of {len(paths)} files, got none")
    return outcomes_of(report)


def differences(without: Outcomes, with_ours: Outcomes) -> list[str]:
    """Tests that became of another in the two runs, a line each."""
    names = sorted(without.keys() | with_ours.keys())
    pairs = [(name, without.get(name, "missing"), with_ours.get(name, "missing")) for name in names]
    return [f"{name}: {before} without, {now} with" for name, before, now in pairs if before != now]


def isolated(folder: Path, source: Path) -> Path:
    """The tests apart from vLLM's sources, which the installed package must not be taken for."""
    apart = folder / "apart"
    apart.mkdir()
    for name in ("tests", "pyproject.toml"):
        (apart / name).symlink_to((source / name).resolve())
    return apart


def main(words: list[str] | None = None) -> int:
    """Runs the tests twice; returns 1 where something became of another."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm.own_tests", description=__doc__)
    parser.add_argument("--source", type=Path, help="an unpacked source distribution of vLLM")
    parser.add_argument("--limit", type=float, default=3600, help="seconds a run may take")
    parser.add_argument("paths", nargs="*", default=list(PATHS), help="files of tests")
    chosen = parser.parse_args(words)
    with TemporaryDirectory() as made:
        folder = Path(made)
        wanted = version_installed()
        source = isolated(folder, chosen.source or downloaded(folder, wanted))
        paths = [path for path in chosen.paths if (source / path.partition("::")[0]).exists()]
        for path in set(chosen.paths) - set(paths):
            print(f"{path}: vLLM {wanted} has none")
        found = {
            name: ran(source, paths, plugins, folder / f"{name}.xml", chosen.limit)
            for name, plugins in PLUGINS.items()
        }
    for name, outcomes in found.items():
        kinds = sorted(set(outcomes.values()))
        counted = [f"{list(outcomes.values()).count(kind)} {kind}" for kind in kinds]
        print(f"{name} the plugin: {', '.join(counted) or 'no tests'}")
    changed = differences(found["without"], found["with"])
    print(*changed, sep="\n")
    return int(bool(changed) or not found["with"])


def version_installed() -> str:
    """The version of vLLM, whichever build is installed."""
    from vllm import __version__

    return __version__.partition("+")[0]


if __name__ == "__main__":
    sys.exit(main())
