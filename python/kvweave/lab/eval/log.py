"""Measurements kept in a file as they are made, so that an interrupted evaluation goes on.

A file is JSON lines, each written whole and on the disk before the next sample begins. The first
says what everything in it was measured on. Later ones say what a job is, what a policy is, or hold
the measurements of one sample of one job. JSON has no NaN and no infinity: they are words here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvweave.arguments import shown
from kvweave.errors import InvalidArgument
from kvweave.lab.eval.measure import Measurement

SCHEMA_VERSION = 3
_KINDS = {
    "int": ("int",),
    "int | None": ("int", "NoneType"),
    "bool": ("bool",),
    "str": ("str",),
    "Role": ("str",),
}
"""What JSON makes of a field's type."""


@dataclass
class LogContents:
    """What a file holds.

    `subject`: what all of it was measured on. `jobs`: plain data of each job by its name;
    `policies`: every setting of each policy by the name it is measured under. `samples`: by job
    and number of the sample, its measurements by policy.
    """

    subject: dict[str, Any] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    policies: dict[str, str] = field(default_factory=dict)
    samples: dict[tuple[str, int], dict[str, Measurement]] = field(default_factory=dict)

    def keep(self, entry: Mapping[str, Any]) -> None:
        """Takes in one line after the first.

        Raises ValueError, KeyError or TypeError for a line that says nothing known.
        """
        if "define_job" in entry:
            self.jobs[str(entry["define_job"])] = dict(entry["as"])
        elif "define_policy" in entry:
            self.policies[str(entry["define_policy"])] = str(entry["as"])
        else:
            at = str(entry["job"]), int(entry["sample"])
            made = [_measurement(plain) for plain in entry["measurements"]]
            if any(m.sample != at[1] for m in made):
                raise ValueError(f"sample {at[1]} with measurements of another")
            self.samples.setdefault(at, {}).update({m.policy: m for m in made})


class MeasurementLog:
    """A file of measurements that is gone on with.

    `subject` is plain data that all figures depend on: a file of another subject is refused with
    the key that differs, and so are a job or a policy that mean something else in the file. Jobs
    and policies that the file does not know are added. A last line that an interruption cut short
    is dropped. One process may write a file at a time. Without a path nothing outlives the process.

    # Errors
    `InvalidArgument` for a file of another subject, or one that is no log.
    """

    def __init__(self, path: Path | None, subject: Mapping[str, Any]) -> None:
        self._path = path
        wanted = _plain({"schema_version": SCHEMA_VERSION, **subject})
        self._held = LogContents(subject=wanted)
        if path is None:
            return
        whole = _whole(path) if path.exists() else b""
        if whole:
            self._held = _contents(path, whole)
            _same(path, "measurements", wanted, self._held.subject)
            if len(whole) < path.stat().st_size:
                os.truncate(path, len(whole))
        else:
            # Half a first line is what an interruption left; anything else is somebody's file.
            if path.exists() and not _line(wanted).startswith(path.read_bytes()):
                raise InvalidArgument(f"{path}: expected a log of measurements, got no whole line")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            self._write(wanted)

    @property
    def subject(self) -> dict[str, Any]:
        """What all of it was measured on, and the version of the file."""
        return self._held.subject

    def define(self, jobs: Mapping[str, Mapping[str, Any]], policies: Mapping[str, str]) -> None:
        """Says what jobs and policies are, before they are measured.

        Raises InvalidArgument when one means something else in the file; then nothing is added.
        """
        new_jobs = {name: _plain(job) for name, job in jobs.items()}
        for name, job in new_jobs.items():
            if name in self._held.jobs:
                _same(self._path, f"job {name}", job, self._held.jobs[name])
        known = {name: self._held.policies.get(name, told) for name, told in policies.items()}
        _same(self._path, "policies", dict(policies), known)
        new = [{"define_job": n, "as": j} for n, j in new_jobs.items() if n not in self._held.jobs]
        new += [
            {"define_policy": name, "as": told}
            for name, told in policies.items()
            if name not in self._held.policies
        ]
        for entry in new:
            self._held.keep(entry)
            self._write(entry)

    def measured(self, job: str, sample: int) -> dict[str, Measurement]:
        """What the file holds of a sample, by policy; nothing when it was not measured yet."""
        return dict(self._held.samples.get((job, sample), {}))

    def append(self, job: str, sample: int, measurements: Sequence[Measurement]) -> None:
        """Keeps measurements of one sample; they are on the disk when this returns."""
        plain = [_plain(asdict(m)) for m in measurements]
        self._write({"job": job, "sample": sample, "measurements": plain})
        held = self._held.samples.setdefault((job, sample), {})
        held.update({m.policy: m for m in measurements})

    def _write(self, entry: dict[str, Any]) -> None:
        if self._path is None:
            return
        with self._path.open("ab") as file:
            file.write(_line(entry))
            file.flush()
            os.fsync(file.fileno())


def read_log(path: Path) -> LogContents:
    """What a file holds, which another process may be writing: a cut last line is passed over.

    Raises InvalidArgument for a file that is no log, or a log of another version; OSError.
    """
    whole = _whole(path)
    if not whole:
        raise InvalidArgument(f"{path}: expected a log of measurements, got no whole line")
    held = _contents(path, whole)
    version = held.subject.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InvalidArgument(
            f"{path}: expected schema_version {SCHEMA_VERSION}, got {shown(version)}"
        )
    return held


def _line(entry: dict[str, Any]) -> bytes:
    # In ASCII, since an answer may hold half a character, or what some call an end of line.
    return (json.dumps(entry, allow_nan=False) + "\n").encode("ascii")


def _whole(path: Path) -> bytes:
    """The lines that end."""
    text = path.read_bytes()
    return text[: text.rfind(b"\n") + 1]


def _contents(path: Path, whole: bytes) -> LogContents:
    try:
        subject, *entries = [json.loads(line) for line in whole.split(b"\n")[:-1]]
        if not isinstance(subject, dict):
            raise TypeError(f"a first line {shown(subject)}")
        held = LogContents(subject=subject)
        for entry in entries:
            held.keep(entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgument(
            f"{path}: expected a log of measurements, got {shown(error)}"
        ) from error
    return held


def _same(
    path: Path | None, what: str, wanted: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    for key in (*wanted, *found):
        if wanted.get(key) != found.get(key):
            raise InvalidArgument(
                f"{path}: expected {what} with {shown(key)[1:-1]} = {wanted.get(key)!r}, "
                f"got {shown(found.get(key))}"
            )


def _measurement(plain: Mapping[str, Any]) -> Measurement:
    """A measurement as it was; raises TypeError or ValueError for another kind of data."""
    read: dict[str, Any] = dict(plain)
    for f in fields(Measurement):
        kind = str(f.type)
        if kind == "float":
            read[f.name] = float(plain[f.name])
        elif kind.startswith("tuple"):
            read[f.name] = tuple(float(number) for number in plain[f.name])
        elif type(plain[f.name]).__name__ not in _KINDS[kind]:
            raise TypeError(f"{f.name} = {shown(plain[f.name])}")
    return Measurement(**read)


def _plain(value: Any) -> Any:
    """Data as it comes back from JSON; numbers that it has not, as words that `float` reads."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
