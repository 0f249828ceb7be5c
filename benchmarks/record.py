"""Keeps measurements in the tree: `records/<machine>/<date>-<case>.json`, one list a file."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvweave.bench.rows import Row

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path(__file__).resolve().parent / "records"
PACKAGES = ("kvweave", "torch", "transformers", "numpy")


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, memory, versions, threads."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def busy() -> str:
    """Why this machine is no place to measure now; empty when it is quiet."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return f"expected a quiet machine, got load {load:.1f} on {cores} cores" if load > 0.5 else ""


def append(case: str, rows: list[Row], folder: Path = RECORDS) -> Path:
    """Adds one run to the file of this machine, day and case; returns the file."""
    now = datetime.now(timezone.utc)
    here = machine()
    slug = re.sub(r"[^a-z0-9]+", "-", f"{here['processor']} {here['cores']} cores".lower())
    path = folder / slug.strip("-") / f"{now:%Y-%m-%d}-{case}.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    runs.append(
        {
            "case": case,
            "time": now.isoformat(timespec="seconds"),
            "commit": _commit(),
            "machine": here,
            "rows": [asdict(row) for row in rows],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(runs, indent=1) + "\n")
    return path


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = "+changes" if git("status", "--porcelain", "-uno") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed
