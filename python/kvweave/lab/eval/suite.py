"""A suite: what one run measures on one model, as plain data that a file can hold."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvweave.arguments import shown
from kvweave.errors import InvalidArgument

RIVALS = (
    "naive,random:share=0.2,epic,epic:first=32,cacheblend,cacheblend:ratio=0.25,sparsex,"
    "prophet:share=0.2,infoflow:share=0.2,foresight:share=0.05,foresight:share=0.1,"
    "foresight:share=0.2"
)
"""Every rule that needs no head map, at budgets of about equal FLOPs, with lots drawn beside."""


@dataclass(frozen=True)
class Job:
    """One task at a length, in tokens of a prompt, and how many samples of it; see `task_of`."""

    task: str
    length: int
    samples: int
    corpus: str | None = None
    layout: str | None = None
    documents: int | None = None


@dataclass(frozen=True)
class Suite:
    """Jobs, and the policies that all of them are measured under.

    `policies` as in `read_policies`. `controlled`: samples of each job that also get the noise
    floor and the control without Δ-RoPE. `agreement_tokens`: see `SampleMeasurer`.
    """

    name: str
    jobs: tuple[Job, ...]
    policies: str = RIVALS
    seed: int = 0
    max_new_tokens: int = 32
    agreement_tokens: int = 0
    controlled: int = 2

    @property
    def longest(self) -> int:
        """The longest prompt, in tokens."""
        return max(job.length for job in self.jobs)


SUITES: tuple[Suite, ...] = (
    Suite(
        "smoke",
        (Job("lm", 192, 2), Job("needle", 192, 2)),
        policies="naive,sparsex,foresight:share=0.2:draft=4",
        max_new_tokens=8,
        controlled=1,
    ),
    Suite(
        "quick",
        (Job("lm", 1024, 2), Job("needles", 1024, 2), Job("chain", 1024, 2)),
        policies="naive,epic,cacheblend,sparsex,foresight",
        controlled=1,
    ),
    Suite(
        "standard",
        (
            Job("lm", 2048, 24, "kjv", "uneven"),
            Job("lm", 2048, 24, "python", "uneven"),
            Job("needles", 2048, 24, layout="uneven"),
            Job("lookups", 2048, 24, layout="uneven"),
            Job("chain", 2048, 24, layout="uneven"),
            Job("two-hop", 2048, 24, layout="uneven"),
        ),
        controlled=4,
    ),
)
"""What `kvweave eval --suite` knows by name."""


def suite_of(name: str) -> Suite:
    """A suite by its name, or from a JSON file with the fields of `Suite`.

    Raises InvalidArgument for another name, or a file that says something else; OSError.
    """
    for suite in SUITES:
        if suite.name == name:
            return suite
    if not name.endswith(".json"):
        known = ", ".join(suite.name for suite in SUITES)
        raise InvalidArgument(f"suite: expected one of {known}, or a .json file, got {shown(name)}")
    path = Path(name)
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name}: expected JSON, got {error}") from error
    return _suite(name, data, path.stem)


def _suite(what: str, data: Any, name: str) -> Suite:
    if not isinstance(data, dict) or not isinstance(data.get("jobs"), list) or not data["jobs"]:
        raise InvalidArgument(f"{what}: expected an object with a list of jobs, got {_short(data)}")
    jobs = tuple(
        Job(**_fields(f"{what}: job {number}", Job, job, ("task", "length", "samples")))
        for number, job in enumerate(data["jobs"], 1)
    )
    rest = {key: value for key, value in data.items() if key != "jobs"}
    return Suite(**{"name": name, **_fields(what, Suite, rest, ()), "jobs": jobs})


def _fields(what: str, kind: Any, data: Any, needed: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a dataclass that data gives, each of its type.

    Raises InvalidArgument naming the field.
    """
    if not isinstance(data, dict):
        raise InvalidArgument(f"{what}: expected an object, got {_short(data)}")
    known = {field.name: str(field.type) for field in fields(kind)}
    for key, value in data.items():
        if key not in known:
            raise InvalidArgument(f"{what}: expected one of {', '.join(known)}, got {shown(key)}")
        whole = isinstance(value, int) and not isinstance(value, bool)
        if known[key].startswith("int") and value is None and "None" in known[key]:
            continue
        if known[key].startswith("int") and not (whole and value >= (key == "samples")):
            raise InvalidArgument(f"{what}: expected {key} as a count, got {_short(value)}")
        word = isinstance(value, str) or (value is None and known[key] == "str | None")
        if not known[key].startswith("int") and not word:
            raise InvalidArgument(f"{what}: expected {key} as a word, got {_short(value)}")
    for key in needed:
        if key not in data:
            raise InvalidArgument(f"{what}: expected {key}, got {_short(data)}")
    return data


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
