"""What a paper claims beside what was measured here: the table on its page in `docs/papers`.

A paper's figures are typed, behind the table or figure of it that has them. Ours never are: each is
read from a record, or from the line of a document that says how it was measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from benchmarks.report.record import RECORDS, ROOT
from benchmarks.report.table_rows import figure, markdown_row, recorded, valued
from kvweave.errors import InvalidArgument

Runs: TypeAlias = dict[str, dict[str, Any]]
"""The newest run of each case."""
Shown: TypeAlias = Callable[[Any], str]


class Measured(NamedTuple):
    """A figure as it is shown, the machine and the day, and the file that has it."""

    shown: str
    on: str
    source: Path


Figure: TypeAlias = Callable[[Runs], Measured]


@dataclass(frozen=True)
class Claim:
    """A row of the table.

    `where`: the table, figure or section of the paper. `claimed`: what stands there, in our words.
    `said`: what was measured here, with braces for each of `figures`; without figures it says why
    there is none.
    """

    where: str
    claimed: str
    said: str
    figures: tuple[Figure, ...] = ()


def percent(share: float) -> str:
    """A share as it is said."""
    return f"{100 * share:.3g} %"


def missing(share: float) -> str:
    """What a share leaves of the whole."""
    return percent(1 - share)


def inverse(ratio: float) -> str:
    """How many times as fast something is that takes this share of the time."""
    return figure(1 / ratio)


def milliseconds(microseconds: float) -> str:
    """Microseconds, as milliseconds."""
    return figure(microseconds / 1000)


def row(case: str, name: str, column: str | None = None, shown: Shown = figure) -> Figure:
    """A figure of the newest run of a case; no column: the row's measured value."""

    def found(runs: Runs) -> Measured:
        return _of(runs, case, shown(valued(runs[case], name, column)))

    return found


def beside(case: str, name: str, peer: str) -> Figure:
    """How many times as long a peer takes in the same process."""

    def found(runs: Runs) -> Measured:
        ratios: dict[str, float] = recorded(runs[case], name)["detail"]["ratios"]
        return _of(runs, case, figure(ratios[peer]))

    return found


def recovered(policy: str, of: str = "gap_closed", task: str = "all ") -> Figure:
    """What a policy reaches at 4K tokens on Qwen2.5-Coder-0.5B: a value with an interval there."""

    def found(_: Runs) -> Measured:
        path = RECORDS / "recovery" / "qwen-coder-4096.json"
        sections = json.loads(path.read_text())["sections"]
        (section,) = [one for one in sections if one["title"].startswith(task)]
        (chosen,) = [one for one in section["rows"] if one["policy"] == policy]
        value = chosen[of]
        shown = figure(value["value"] if isinstance(value, dict) else value)
        return Measured(shown, "NVIDIA H100, 2026-11-24", path)

    return found


def packed(way: str) -> Figure:
    """KL of a way to pack pages on SmolLM2-135M, in nats a token: the mean over texts."""

    def found(_: Runs) -> Measured:
        path = RECORDS / "packed_front" / "smollm2-1024.json"
        document = json.loads(path.read_text())
        losses = [text[way]["kl"] for text in document["texts"]]
        return Measured(figure(sum(losses) / len(losses)), _on(document), path)

    return found


def chosen(pages: int, unstable: str) -> Figure:
    """KL of decode steps that read so many pages on SmolLM2-135M, in nats a token.

    Ranked by min-max every 16 steps; what is not read is left out.
    """
    wanted = (pages, unstable, 16, "min-max", False)

    def found(_: Runs) -> Measured:
        path = RECORDS / "page_budgets" / "smollm2-1024.json"
        document = json.loads(path.read_text())
        named = ("pages", "unstable", "every", "score", "estimate")
        (budget,) = [
            one for one in document["rows"] if tuple(one[name] for name in named) == wanted
        ]
        return Measured(figure(budget["kl"]), _on(document), path)

    return found


def stable(*keys: Any, of: str = "smollm2-1024") -> Figure:
    """A figure of the stability that page budgets were chosen by, of a model and length."""

    def found(_: Runs) -> Measured:
        path = RECORDS / "page_budgets" / f"{of}.json"
        document = json.loads(path.read_text())
        return Measured(figure(_within(document["stability"], keys)), _on(document), path)

    return found


def shared_by_tasks(model: str) -> Figure:
    """The share of a model's unstable heads that two tasks have in common, over all pairs."""

    def found(_: Runs) -> Measured:
        path = RECORDS / "heads" / f"{model}-stability-2048.json"
        document = json.loads(path.read_text())
        shared = document["shared_by_tasks"]
        pairs = [share for at, row in enumerate(shared) for share in row[:at]]
        return Measured(figure(sum(pairs) / len(pairs)), f"two cores, {document['date']}", path)

    return found


def mapped(model: str, *keys: str) -> Figure:
    """A figure of a head map's evidence."""

    def found(_: Runs) -> Measured:
        path = RECORDS / "heads" / f"{model}.json"
        evidence = json.loads(path.read_text())["evidence"]
        on = f"NVIDIA H100, {evidence['date']}"
        return Measured(figure(_within(evidence, keys)), on, path)

    return found


def written(page: str, opening: str, shown: str, on: str) -> Figure:
    """A figure of a document: of the table row, list item or paragraph that begins so.

    For what has no record: the document says how it was measured. Raises InvalidArgument where it
    does not stand there.
    """

    def found(_: Runs) -> Measured:
        path = ROOT / page
        parts = re.split(r"\n(?=\n|\||- )", path.read_text(encoding="utf-8"))
        there = [part.strip() for part in parts if part.strip().startswith(opening)]
        if not any(shown in re.findall(r"\d*\.?\d+", part) for part in there):
            text = f"{page}: expected {shown} in what begins {opening!r}, got none"
            raise InvalidArgument(text, expected=shown, got="none")
        return Measured(shown, on, path)

    return found


def table(claims: Sequence[Claim], runs: Runs, page: Path) -> str:
    """The claims as a table for a page, which links to what has the figures.

    Raises InvalidArgument for a figure that is not there.
    """
    heads = ["in the paper", "it claims", "measured here", "on"]
    lines = [markdown_row(heads), "|---|---|---|---|"]
    for claim in claims:
        measured = [found(runs) for found in claim.figures]
        said = claim.said.format(*(one.shown for one in measured))
        lines.append(markdown_row([claim.where, claim.claimed, said, _places(measured, page)]))
    return "\n".join(lines) + "\n"


def _places(measured: Sequence[Measured], page: Path) -> str:
    """Machines and days, each with what has its figures."""
    sources: dict[str, list[str]] = {}
    for one in measured:
        link = f"[{_name(one.source)}]({_link(one.source, page)})"
        there = sources.setdefault(one.on, [])
        there += [link] if link not in there else []
    return "; ".join(f"{on}: {', '.join(links)}" for on, links in sources.items())


def _of(runs: Runs, case: str, shown: str) -> Measured:
    run = runs[case]
    paths = RECORDS.glob(f"*/{run['time'][:10]}-{case}.json")
    (path,) = [path for path in paths if run in json.loads(path.read_text())]
    return Measured(shown, _on(run), path)


def _on(document: dict[str, Any]) -> str:
    machine = document["machine"]
    return f"{machine.get('gpu', machine['processor'])}, {document['time'][:10]}"


def _within(document: Any, keys: Sequence[Any]) -> Any:
    for key in keys:
        document = document[key]
    return document


def _name(path: Path) -> str:
    """What a link to a record or page is called: a record without its day."""
    return path.name if path.suffix == ".md" else re.sub(r"^[\d-]{10}-", "", path.stem)


def _link(path: Path, page: Path) -> str:
    up = "../" * len(page.parent.relative_to(ROOT).parts)
    return up + path.relative_to(ROOT).as_posix()
