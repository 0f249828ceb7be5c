"""`kvweave profile-heads --scores FILE` without a model: recorded scores alone choose the heads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import call, refused
from families import tiny
from kvweave import HeadClassMap, Runner
from kvweave.errors import KvweaveError
from recorded_heads import recorded_map

LAYERS, HEADS = 4, 2


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    path = tmp_path / "scores.json"
    path.write_text(recorded_map(LAYERS, HEADS).to_json())
    return path


def made(scores: Path, *arguments: object) -> dict[str, Any]:
    out = scores.parent / "made.json"
    result = call("profile-heads", "--scores", scores, *arguments, "--out", out)
    assert result.exit_code == 0, result.output
    plain: dict[str, Any] = json.loads(out.read_text())
    return plain


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_heads_with_the_highest_scores_stay_whole(scores: Path, share: float) -> None:
    plain = made(scores, "--share", share)
    by_length = json.loads(scores.read_text())["evidence"]["by_length"].values()
    mean = np.mean([of["retrieval"] for of in by_length], axis=0).ravel()
    best = set(np.argsort(-mean)[: round(share * LAYERS * HEADS)].tolist())
    whole = {n for n, head in enumerate(plain["heads"]) if head["class"]["kind"] == "full"}
    assert whole == best
    windows = [head["class"] for head in plain["heads"] if head["class"]["kind"] == "window"]
    assert all(window == {"kind": "window", "sink": 16, "recent": 256} for window in windows)


def test_what_was_recorded_is_kept_but_for_what_another_choice_costs(scores: Path) -> None:
    before, after = json.loads(scores.read_text()), made(scores, "--share", 0.5, "--sink", 4)
    for name in ("by_length", "stability", "texts", "seed", "measured_sink", "date"):
        assert after["evidence"][name] == before["evidence"][name]
    assert after["model_fingerprint"] == before["model_fingerprint"]
    assert "held_out_kl" not in after["evidence"]
    unstable = [head["stability"] == "unstable" for head in after["heads"]]
    assert unstable == np.ravel(before["evidence"]["stability"]["unstable"]).tolist()
    again = scores.parent / "made.json"
    assert made(again, "--share", 0.5, "--sink", 4) == after


def test_decode_steps_that_were_not_measured_leave_what_prompts_say(scores: Path) -> None:
    plain = json.loads(scores.read_text())
    del plain["evidence"]["stability"]
    scores.write_text(json.dumps(plain))
    ranked = made(scores, "--share", 1.0, "--top-k", 8)
    kinds = {head["stability"] for head in ranked["heads"]}
    assert kinds == {"stable", "unstable"}
    assert "stability" not in ranked["evidence"]


def test_the_map_is_of_the_model_that_was_scored(tmp_path: Path) -> None:
    model = tiny("llama")
    spec = Runner(model, max_tokens=64, check=False, progress=False).spec
    path = tmp_path / "scores.json"
    for fingerprint, fits in ((spec.fingerprint, True), ("0" * 64, False)):
        path.write_text(recorded_map(LAYERS, HEADS, fingerprint).to_json())
        made(path, "--share", 0.5)
        heads = HeadClassMap.from_json((tmp_path / "made.json").read_text())
        settings = {"max_tokens": 64, "check": False, "progress": False}
        if fits:
            Runner(model, heads=heads, **settings)
        else:
            with pytest.raises(KvweaveError, match="fingerprint|of model|this model"):
                Runner(model, heads=heads, **settings)


def test_neither_torch_nor_transformers_is_imported(scores: Path) -> None:
    code = (
        "import sys\n"
        "from kvweave.cli import app\n"
        f"words = ['profile-heads', '--scores', {str(scores)!r}, '--top-k', '8']\n"
        "app(words, standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "not measured" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--kl", 0.1), "kl: expected a model to read beside it, got none"),
        (("--share", 2), "share: expected 0..1, got 2.0"),
        (("--recent", 0), "window: expected sink >= 0 and recent >= 1, got 16 and 0"),
    ],
)
def test_what_needs_a_model_or_is_no_choice_is_refused(
    scores: Path, arguments: tuple[object, ...], says: str
) -> None:
    assert says in refused("profile-heads", "--scores", scores, *arguments)


def test_without_a_model_or_scores_the_command_to_run_is_said(tmp_path: Path) -> None:
    assert "run: kvweave profile-heads smollm2 --out map.json" in refused("profile-heads")
    pattern = ("--duo", tmp_path / "gates.tsv")
    assert "--scores FILE" in refused("profile-heads", *pattern)


def broken(change: Any) -> str:
    plain = json.loads(recorded_map(LAYERS, HEADS).to_json())
    change(plain)
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not json", "expected"),
        (broken(lambda map: map.pop("evidence")), "expected the scores of a profile"),
        (broken(lambda map: map["evidence"].pop("by_length")), "expected the scores of a profile"),
        (broken(lambda map: map["evidence"].update(stability=[1])), "expected stability by name"),
        (broken(lambda map: map["evidence"].update(stability={})), "expected stability as flags"),
        (broken(lambda map: map["evidence"].update(by_length={"9": {}})), "expected the scores"),
    ],
)
def test_files_without_scores_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "map.json").write_text(text)
    assert says in refused("profile-heads", "--scores", tmp_path / "map.json")
    assert "no such file" in refused("profile-heads", "--scores", tmp_path / "none.json")
