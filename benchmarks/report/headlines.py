"""The README's table: what others take, what we take, and how many times less or more that is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report.record import RECORDS
from benchmarks.report.table_rows import markdown_row, recorded

Runs = dict[str, dict[str, Any]]
"""The newest run of each case."""

RECOVERY = RECORDS / "recovery" / "qwen-coder-4096.json"
REUSED = "TTFT, 32768 tokens, 97 % in documents seen before"
DECODED = "decode step, B=8, 120000 tokens, compiled"
AT_ONCE = "requests of 65536 tokens that ran at once"
SCATTERED = "prefill, 5% of 32K in single rows"


@dataclass(frozen=True)
class Told:
    """What some do, by name, beside what we do; `more` is better, or less."""

    others: tuple[tuple[str, float], ...]
    ours: tuple[str, float]
    unit: str
    more: bool = False

    @property
    def times(self) -> list[float]:
        """How many times better we are than each of the others."""
        ours = self.ours[1]
        return [ours / value if self.more else value / ours for _, value in self.others]

    def cells(self) -> tuple[str, str, str]:
        """Others, ours, and the factors."""
        others = "; ".join(self._told(*other) for other in self.others)
        factors = "; ".join(f"{times:.2g} ×" for times in self.times)
        return others, f"**{self._told(*self.ours)}**", factors

    def _told(self, name: str, value: float) -> str:
        figure = f"{value:.0f}" if value >= 100 or self.more else f"{value:.2g}"
        return f"{name} {figure} {self.unit}".rstrip()


@dataclass(frozen=True)
class Headline:
    """A row of the table: what it says, the case that it is of, and where its figures are.

    `told` takes the case's newest run.
    """

    what: str
    case: str
    told: Callable[[dict[str, Any]], Told]


def beside(
    row: str, peer: tuple[str, str], own: tuple[str, str], unit: str, *, more: bool = False
) -> Callable[[dict[str, Any]], Told]:
    """Two rows of one case, of a run in vLLM: what the table calls them, and how their names end.

    The peer's name is followed by its version.
    """

    def told(run: dict[str, Any]) -> Told:
        (theirs, of_peer), (ours, of_own) = peer, own
        value, mine = (recorded(run, f"{row}: {of}")["value"] for of in (of_peer, of_own))
        version = run["machine"]["packages"]["vllm"].rpartition(".")[0]
        return Told(((f"{theirs} {version}:", value),), (ours, mine), unit, more)

    return told


def scattered(run: dict[str, Any]) -> Told:
    """Attention of scattered rows, beside each peer in the same process."""
    row = recorded(run, SCATTERED)
    ours = row["value"] * 1e-3
    peers = {"FA3, a sequence a run": "FlashAttention 3", "SDPA + mask": "SDPA with a mask"}
    ratios = row["detail"]["ratios"]
    others = tuple((said, ours * ratios[name]) for name, said in peers.items())
    return Told(others, ("kvweave", ours), "ms")


HEADLINES = (
    Headline(
        "first token of a 32K prompt, 97 % of it documents that were read before, Llama-3.1-8B "
        "shape",
        "vllm_segments",
        beside(
            REUSED,
            ("vLLM", "stock"),
            ("with the plugin, `foresight`", "segments, foresight, 10 %, a draft of 8"),
            "ms",
        ),
    ),
    Headline(
        "requests of 64K tokens at once in the same memory, an eighth of it a store of segments, "
        "one KV head in eight whole",
        "vllm_mapped",
        beside(AT_ONCE, ("vLLM", "stock"), ("with the plugin", "mapped"), "", more=True),
    ),
    Headline(
        "a decode step of 8 requests of 120K tokens, the same heads",
        "vllm_compiled",
        beside(DECODED, ("vLLM", "stock"), ("with the plugin", "heads"), "ms"),
    ),
    Headline(
        "attention of 5 % of 32K rows, scattered, one layer of that shape", "cuda_ops", scattered
    ),
)


def left_of_the_gap(path: Path = RECOVERY) -> str:
    """The row of what recovery leaves, over all tasks; Qwen2.5-Coder-0.5B, 4K tokens."""
    sections = json.loads(path.read_text())["sections"]
    (whole,) = [section for section in sections if section["tasks"] > 1]
    left = {
        row["policy"]: 100 * (1 - row["gap_closed"]["value"])
        for row in whole["rows"]
        if row["gap_closed"]
    }
    others = (("CacheBlend", left["cacheblend"]), ("InfoFlow KV", left["infoflow"]))
    told = Told(others, ("`foresight`", left["foresight(share=0.157)"]), "%")
    what = (
        "what reused KV leaves of the distance (KL) to a full prefill, at a fifth of its FLOPs: "
        "four kinds of questions over eight documents"
    )
    return markdown_row((what, *told.cells()))


def markdown(runs: Runs) -> str:
    """The table.

    Raises InvalidArgument for a newest run that lacks a row that is shown.
    """
    rows = [
        markdown_row((h.what, *h.told(runs[h.case]).cells())) for h in HEADLINES if h.case in runs
    ]
    rows.insert(1, left_of_the_gap())
    heads = ["| what | others | kvweave | factor |", "|---|---:|---:|---:|"]
    return "\n".join([*heads, *rows]) + "\n"
