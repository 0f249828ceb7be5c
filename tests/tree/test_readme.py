"""The README's examples run as they stand, and what the documents name exists."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "DESIGN.md", "CONTRIBUTING.md"]
PAGES += [page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "docs").rglob("*.md"))]


def example(page: str) -> Any:
    """The one Python example of a page, compiled."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return compile(code, page, "exec")


def test_own_runner_example_reuses_the_segment(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(example("docs/ops.md"), names)
    plan = names["again"].plan  # type: ignore[attr-defined]
    assert plan.reused_segment > 0
    assert str(plan) in capsys.readouterr().out


def test_notebook_example_reuses_both_documents(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(example("README.md"), names)
    assert "spring" in names["answer"].text  # type: ignore[attr-defined]
    report = names["answer"].report  # type: ignore[attr-defined]
    assert report.reused_segment > 100
    assert 0.0 < report.row_share < 1.0
    assert capsys.readouterr().out.strip()


def test_quick_start_example_finds_its_document() -> None:
    names: dict[str, object] = {}
    exec(example("docs/notebook-start.md"), names)
    assert names["runner"].cache.stats()["frozen_hits"] > 0  # type: ignore[attr-defined]


def test_tiers_example_finds_its_document_again(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(example("docs/tiers.md"), names)
    (document,) = names["answer"].report.documents  # type: ignore[attr-defined]
    assert document.source == "disk"
    assert names["answer"].report.reused_segment > 100  # type: ignore[attr-defined]
    assert "documents reused from: disk 1; " in capsys.readouterr().out


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_every_law_names_tests_that_exist() -> None:
    design = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    table = design.split("## Laws")[1].split("## ")[0]
    named = re.findall(r"`([\w/]+\.(?:rs|py))`: ((?:`\w+`(?:, )?)+)", table)
    assert len(named) >= 12
    missing = [
        f"{file}: {test}"
        for file, tests in named
        for test in re.findall(r"`(\w+)`", tests)
        if not re.search(rf"\b(?:fn|def) {test}\(", (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert not missing
