"""The README's examples run as they stand, and what the documents name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_there_is_an_example_for_each_user() -> None:
    assert len(EXAMPLES) == 2


def test_own_runner_example_reuses_the_segment(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(EXAMPLES[1], "README.md", "exec"), names)
    plan = names["again"].plan  # type: ignore[attr-defined]
    assert plan.reused_segment > 0
    assert str(plan) in capsys.readouterr().out


def test_notebook_example_reuses_both_documents(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(EXAMPLES[0], "README.md", "exec"), names)
    assert "spring" in names["answer"].text  # type: ignore[attr-defined]
    report = names["answer"].report  # type: ignore[attr-defined]
    assert report.reused_segment > 100
    assert 0.0 < report.row_share < 1.0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", ["README.md", "DESIGN.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    missing = [link for link in links if not (ROOT / link).exists()]
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
