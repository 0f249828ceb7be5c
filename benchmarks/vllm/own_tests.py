"""vLLM's own tests, with the plugin registered and without: the same ones must fail.

`python -m benchmarks.vllm.own_tests --folder FOLDER [PATHS…]` runs the tests that touch what the
plugin registers (attention backends, block tables, prefix caching, KV connectors) from vLLM's
source distribution, of the version that is installed, twice: with no plugin, and with ours loaded
before any test. What became of another in the two runs is listed, and the exit status is 1 then;
`--record` keeps how many tests ended in which way. What FOLDER does not have yet comes from the
package index, by pip; for a machine without a network it is made elsewhere by `--fetch VERSION`.
No hub of models is asked: both runs read the shapes of `own_models`, and there are no weights.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from benchmarks.quality.sampled import show
from benchmarks.vllm import registered
from benchmarks.vllm.own_models import write_models
from kvweave.lab.bench.rows import Row

CASE = "vllm_own_tests"
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
THEIRS = "dummy_kv_connector_plugin"
"""A plugin that some of the tests bring along; vLLM loads none that its list does not name."""
PLUGINS = {"without": THEIRS, "with": f"kvweave,{THEIRS}"}
BUILD_TOOLS = ("setuptools-scm", "setuptools-rust", "packaging")
TEST_TOOLS = ("pytest-asyncio", "tblib")
PIP = (sys.executable, "-m", "pip")
Outcomes = dict[str, str]
"""What became of each test: `passed`, `failed`, `error` or `skipped`."""


def with_path(folder: Path) -> dict[str, str]:
    """The environment, with a folder first on Python's path."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def install(folder: Path, *names: str) -> None:
    """Installs packages into a folder of their own, without what torch and vLLM bring along."""
    words = ["install", "--quiet", "--no-deps", "--target", str(folder), *names]
    subprocess.run([*PIP, *words], check=True)


def download(folder: Path, wanted: str) -> None:
    """Puts the unpacked source distribution of a version of vLLM into a folder."""
    tools = folder / "build"
    install(tools, *BUILD_TOOLS, "semantic_version", "vcs-versioning")
    # Its metadata is made before it is handed out; nothing is built.
    made = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": wanted}
    words = ["download", "--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
    words += [f"vllm=={wanted}", "-d", str(folder)]
    subprocess.run([*PIP, *words], check=True, env={**with_path(tools), **made})
    archive = folder / f"vllm-{wanted}.tar.gz"
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")


def outcomes_of(report: Path) -> Outcomes:
    """What a JUnit report of pytest says of each test."""
    found: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
        found[name] = next((kinds[part.tag] for part in case if part.tag in kinds), "passed")
    return found


def ran(
    source: Path, paths: list[str], plugins: str, report: Path, limit_s: float, tools: Path
) -> Outcomes:
    """What became of the tests with the plugins of this list; `tools` is on Python's path.

    Models come from the folder `hub` beside the report alone: asking a hub costs seconds a test.
    """
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no"]
    words += ["-p", registered.__name__, f"--junitxml={report}", "--rootdir", str(source)]
    hub = {"HF_HUB_CACHE": str(report.parent / "hub"), "HF_HUB_OFFLINE": "1"}
    env = {**with_path(tools), **hub, "VLLM_PLUGINS": plugins}
    env["PYTHONPATH"] += os.pathsep + str(Path(__file__).resolve().parents[2])
    subprocess.run([*words, *paths], cwd=source, env=env, timeout=limit_s, check=False)
    if not report.exists():
        raise RuntimeError(f"pytest: expected a report of {len(paths)} files, got none")
    return outcomes_of(report)


def differences(without: Outcomes, with_ours: Outcomes) -> list[str]:
    """Tests that became of another in the two runs, a line each."""
    names = sorted(without.keys() | with_ours.keys())
    pairs = [(name, without.get(name, "missing"), with_ours.get(name, "missing")) for name in names]
    return [f"{name}: {before} without, {now} with" for name, before, now in pairs if before != now]


def rows_of(found: dict[str, Outcomes]) -> list[Row]:
    """How many tests became of what with the plugin, and without it."""
    now, before = (Counter(found[name].values()) for name in ("with", "without"))
    rows = [
        Row(f"tests that end as {kind}", now[kind], "", None, {"without the plugin": before[kind]})
        for kind in sorted(now | before)
    ]
    changed = differences(found["without"], found["with"])
    return [*rows, Row("tests that end otherwise than without", len(changed), "", None, {})]


def isolated(folder: Path, source: Path) -> Path:
    """The tests apart from vLLM's sources, which the installed package must not be taken for."""
    apart = folder / "apart"
    apart.mkdir()
    for name in ("tests", "pyproject.toml"):
        (apart / name).symlink_to((source / name).resolve())
    return apart


def fetched(folder: Path, wanted: str) -> tuple[Path, Path]:
    """The source and what its tests import, in a folder; what it does not have is downloaded."""
    folder.mkdir(parents=True, exist_ok=True)
    source, tools = folder / f"vllm-{wanted}", folder / "tools"
    if not source.is_dir():
        download(folder, wanted)
    if not tools.is_dir():
        install(tools, *TEST_TOOLS)
    return source, tools


def main(words: list[str] | None = None) -> int:
    """Runs the tests twice; returns 1 where something became of another."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm.own_tests", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of vLLM's source")
    parser.add_argument("--fetch", metavar="VERSION", help="download its source, and run nothing")
    parser.add_argument("--limit", type=float, default=3600, help="seconds a run may take")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/records")
    parser.add_argument("paths", nargs="*", default=list(PATHS), help="files of tests")
    chosen = parser.parse_args(words)
    wanted = chosen.fetch or version_installed()
    source, tools = fetched(chosen.folder.resolve(), wanted)
    if chosen.fetch:
        return 0
    with TemporaryDirectory() as made:
        folder = Path(made)
        apart = isolated(folder, source)
        write_models(folder / "hub")
        paths = [path for path in chosen.paths if (apart / path.partition("::")[0]).exists()]
        for path in sorted(set(chosen.paths) - set(paths)):
            print(f"{path}: vLLM {wanted} has none")
        found = {
            name: ran(apart, paths, plugins, folder / f"{name}.xml", chosen.limit, tools)
            for name, plugins in PLUGINS.items()
        }
    show(CASE, rows_of(found), chosen.record)
    changed = differences(found["without"], found["with"])
    print(*changed, sep="\n")
    return int(bool(changed) or not found["with"])


def version_installed() -> str:
    """The version of vLLM, whichever build is installed."""
    from vllm import __version__

    return __version__.partition("+")[0]


if __name__ == "__main__":
    sys.exit(main())
