"""What else reads from a disk, beside the store: fio (Debian), and foyer's disk cache.

Each reads in a process of its own and times itself. Where fio, or cargo for foyer, is not
installed, there is nothing of it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

FOYER = Path(__file__).parents[1] / "foyer"


def fio_seconds(files: Sequence[Path], chunk: int, in_flight: int, rounds: int) -> float | None:
    """The median time in which fio reads some files, one after the other, past the page cache."""
    program = shutil.which("fio")
    if program is None:
        return None
    names = ":".join(str(file).replace(":", r"\:") for file in files)
    said = [f"--filename={names}", f"--bs={chunk}", f"--iodepth={in_flight}", "--name=shards"]
    said += ["--rw=read", "--direct=1", "--ioengine=libaio", "--readonly"]
    said += ["--file_service_type=sequential", "--output-format=json"]
    size = sum(file.stat().st_size for file in files)
    return size / float(np.median([_fio_speed([program, *said]) for _ in range(rounds)]))


def _fio_speed(command: list[str]) -> float:
    """Bytes a second of one run."""
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (job,) = json.loads(told)["jobs"]
    return float(job["read"]["bw_bytes"])


def foyer_seconds(folder: Path, count: int, size: int, in_flight: int, rounds: int) -> float | None:
    """The median time in which foyer reads so many values of so many bytes from its disk."""
    cargo = shutil.which("cargo")
    if cargo is None:
        return None
    build = [cargo, "build", "--release", "--quiet", "--locked"]
    subprocess.run(build, cwd=FOYER, check=True)
    program = FOYER / "target" / "release" / "foyer-peer"
    arguments = [str(folder), *map(str, (count, size, in_flight, rounds + 1))]
    told = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
    _, *seconds = json.loads(told.stdout)
    return float(np.median(seconds))
