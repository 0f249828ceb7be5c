"""The pages of papers: figures measured here are those of records; what has none says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.report import results
from benchmarks.report.papers import CLAIMS, claims
from benchmarks.report.papers.claims import Claim, row, table, written
from kvweave.errors import InvalidArgument

ALL = [claim for listed in CLAIMS.values() for claim in listed]
ROW = row("vllm", "TTFT, 32768 tokens: ours", "÷ stock")
PAGE = results.PAPERS / "sparsex.md"


def test_every_page_shows_the_newest_records() -> None:
    told = results.of_papers(results.newest())
    assert set(told) == set(results.PAPERS.glob("*.md"))
    for page, part in told.items():
        text = page.read_text(encoding="utf-8")
        assert results.filled(text, part, "claims") == text, f"{page.name}: make results"


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim.where)
def test_a_claim_names_its_place_and_what_was_measured(claim: Claim) -> None:
    assert re.match(r"(Table|Figures?) \d|§\d", claim.where)
    assert claim.said.count("{}") == len(claim.figures)
    assert bool(claim.figures) != claim.said.startswith("not measured")
    # A figure that was measured here is read: what is typed beside it are settings, never decimals.
    typed = re.findall(r"\d+\.\d+", re.sub(r"(Qwen|Llama-|vLLM |torch )[\d.]+", "", claim.said))
    assert typed == ["0.5"] * claim.said.count("Coder-0.5B")


def test_a_figure_is_the_records_own() -> None:
    """By hand: a figure of one record, and a machine and a day for it."""
    runs = results.newest()
    (found,) = (
        each["of"]["÷ stock"]
        for each in runs["vllm"]["rows"]
        if each["name"] == "TTFT, 32768 tokens: ours"
    )
    shown, on, source = ROW(runs)
    assert shown == f"{found:.3g}"
    assert on == f"NVIDIA H200, {runs['vllm']['time'][:10]}"
    assert source.name == f"{runs['vllm']['time'][:10]}-vllm.json"
    line = table([Claim("Table 1", "much", "{} of it", (ROW, ROW))], runs, PAGE).splitlines()[2]
    link = f"[vllm](../../benchmarks/records/nvidia-h200/{source.name})"
    assert line == f"| Table 1 | much | {shown} of it | {on}: {link} |"


def test_a_figure_that_is_not_there_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = results.newest()
    with pytest.raises(InvalidArgument, match="newest run of vllm: expected the row"):
        ROW({**runs, "vllm": {**runs["vllm"], "rows": []}})
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text("| one | 2.50 (.7) |\n| two | 12.5 |\n\nText of 3.\nAnd 4.\n")
    assert written("a.md", "| one |", "2.50", "by hand")(runs).shown == "2.50"
    assert written("a.md", "Text of", "4", "by hand")(runs).shown == "4"
    for opening, figure in (("| two |", "2.5"), ("| two |", "2.50"), ("| one |", "12.5")):
        with pytest.raises(InvalidArgument, match=f"a.md: expected {figure} in what begins"):
            written("a.md", opening, figure, "by hand")(runs)


def test_foresight_closes_more_than_sparsex_but_where_the_page_says() -> None:
    """For no more FLOPs, in every task on record; the two that are left are nearly all computed.

    A record whose smallest budget of `foresight` is above `sparsex`'s FLOPs compares nothing.
    """
    behind, compared = set(), 0
    for path in (claims.RECORDS / "recovery").glob("*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        for section in document.get("sections", ()) if isinstance(document, dict) else ():
            by_name = {row["policy"]: row for row in section["rows"]}
            (sparsex,) = [r for name, r in by_name.items() if name.startswith("sparsex")] or [None]
            if sparsex is None or section["tasks"] > 1:
                continue
            closed = [
                row["gap_closed"]["value"]
                for name, row in by_name.items()
                if name.startswith("foresight") and row["flops_ratio"] <= sparsex["flops_ratio"]
            ]
            if not closed:
                continue
            compared += 1
            if max(closed) <= sparsex["gap_closed"]["value"]:
                behind.add(section["title"])
                assert sparsex["flops_ratio"] > 0.8
    assert compared >= 30
    assert behind == {"needles, short 8, sotu, 2048", "needles, interleaved 32, sotu, 2048"}
