"""The demo on the real small model: what each policy reuses, shares, and says about it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvweave import demo
from kvweave.cli import app

# The demo is a minute on the real model.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """The printed table and the JSON document of one prompt in share mode."""
    path: Path = tmp_path_factory.mktemp("demo") / "rows.json"
    words = ["demo", "--prompts", "1", "--mode", "share", "--dtype", "f32", "--json", str(path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.stdout, json.loads(path.read_text())


def test_every_policy_has_a_row_and_an_answer(shared: tuple[str, dict]) -> None:
    text, document = shared
    rows = {row["policy"]: row for row in document["rows"]}
    assert list(rows) == list(demo.POLICIES)
    assert document["dtype"] == "float32"
    for name, row in rows.items():
        assert row["answer"]
        assert f"\n{name} " in text.replace("\n ", "\n")
        assert row["reused_prefix"] + row["reused_segment"] + row["recomputed"] == row["tokens"]


def test_a_prefix_cache_gives_the_opening_alone(shared: tuple[str, dict], smollm2) -> None:
    rows = {row["policy"]: row for row in shared[1]["rows"]}
    texts = demo.knowledge(smollm2[1])
    parts = demo.prompt_parts(smollm2[1], demo.QUESTIONS[0], texts)
    assert parts[:2] == demo.opening(smollm2[1])
    assert rows["full"]["reused_prefix"] == 0
    assert 20 < rows["prefix"]["reused_prefix"] < 60
    assert rows["prefix"]["reused_segment"] == 0
    assert rows["prefix"]["kl"] < 1e-3
    assert rows["naive"]["reused_segment"] > 0.9 * rows["naive"]["tokens"]


def test_what_cannot_be_shared_is_materialised_and_says_why(shared: tuple[str, dict]) -> None:
    text, document = shared
    rows = {row["policy"]: row for row in document["rows"]}
    reasons = {name: row["mode_reason"] for name, row in rows.items() if row["mode_reason"]}
    assert set(reasons) == {"cacheblend", "sparsex"}
    for name, reason in reasons.items():
        assert rows[name]["mode"] == "materialise"
        assert f"materialised, not shared: {reason}" in text
    for name in ("naive", "epic", "foresight"):
        assert rows[name]["mode"] == "share"
        assert rows[name]["shared_kv_bytes"] > rows[name]["kv_bytes"] > 0


def test_means_are_means(shared: tuple[str, dict]) -> None:
    rows = [demo.Row(**row) for row in shared[1]["rows"]]
    (full, *_) = demo.means(rows)
    assert (full.prompt, full.policy, full.ttft_ratio) == (0, "full", 1.0)
    assert full.tokens == rows[0].tokens
    assert [row.mode for row in demo.means(rows)] == [row.mode for row in rows]


def test_an_unknown_mode_is_refused() -> None:
    result = CliRunner().invoke(app, ["demo", "--mode", "steal"])
    assert result.exit_code == 2
    assert "expected materialise or share, got 'steal'" in " ".join(result.stderr.split())
