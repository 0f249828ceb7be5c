"""Head maps that certifying finds: measured as the model has them, and carried by the profile."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certificates import EFFORT, SMALL, bound_between, rows, with_bytes, with_tokenizer
from commands import call, refused
from head_maps import classes_of, head_map, masked_reference
from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument
from kvweave.lab.eval.corpus import corpus_of, halves
from kvweave.lab.profile import CertifyJob, Effort, HeadLadder, certify, effort_of
from kvweave.lab.profile.losses import StageJobs, samples_needed
from kvweave.policies import Foresight
from kvweave.policies.policy_profile import Bound, PolicyProfile, heads_digest
from kvweave.runner import Runner
from kvweave.runner.lossy.divergence import kl_per_token


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return with_bytes()


@pytest.fixture(scope="module")
def runner(loaded: tuple[Any, Any]) -> Runner:
    return Runner(*loaded, max_tokens=4096, progress=False, check=False)


@pytest.fixture(scope="module")
def ladder(loaded: tuple[Any, Any]) -> HeadLadder:
    """Maps of a model of four heads; a window that leaves something out of 512 tokens."""

    def make_runner(heads: HeadClassMap | None) -> Runner:
        return Runner(*loaded, max_tokens=4096, progress=False, check=False, heads=heads)

    return HeadLadder(make_runner, (0.25, 0.75), sink=4, recent=256, prompts=1)


@pytest.fixture(scope="module")
def mapped(
    runner: Runner, ladder: HeadLadder, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PolicyProfile, Path]:
    """A certificate of a bound that everything keeps, and the log of its making."""
    log = tmp_path_factory.mktemp("certify") / "mapped.jsonl"
    return certify(runner, Bound("kl", 1e3), effort=SMALL, ladder=ladder, log=log), log


def test_a_head_map_is_found_where_it_is_cheapest(mapped: tuple[PolicyProfile, Path]) -> None:
    made, _ = mapped
    assert made.policy == "naive"
    assert made.heads is not None
    digest = heads_digest(made.heads)
    assert [(tried.whole, tried.heads) for tried in made.tried_heads] == [(1, 4), (3, 4)]
    assert digest == made.tried_heads[0].digest
    row = rows(made, "certify", digest)["naive"]
    assert (row.flops_share, row.kv_share) == (made.flops_share, made.kv_share)
    # One of four heads keeps 512 tokens, the others 256 and four in whole pages of 16.
    assert made.kv_share == pytest.approx((1 + 3 * 288 / 512) / 4, abs=0.05)
    assert rows(made, "certify").keys() == {"naive"}
    for tried in made.tried_heads:
        assert rows(made, "search", tried.digest).keys() >= {"full"}


def test_what_full_loses_under_a_map_is_what_the_model_loses(
    mapped: tuple[PolicyProfile, Path], ladder: HeadLadder, runner: Runner, loaded: tuple[Any, Any]
) -> None:
    """Against transformers' own forward with a mask for every head."""
    made, _ = mapped
    (task,) = (job.on("sotu#first") for job in SMALL.jobs)
    at = StageJobs("search", (task,))
    for heads in ladder.maps(runner, "sotu#first", 0):
        kept = [entry["class"] for entry in json.loads(heads.to_json())["heads"]]
        windows = [(one.get("recent", 0), one.get("sink", 0)) for one in kept]
        classes = np.asarray(windows, np.int32).reshape(heads.layers, heads.kv_heads, 2)
        found = []
        for index in range(SMALL.search):
            sample = task.sample(runner.prompts.tokenizer, at.numbers(0, index))
            tokens = runner.tokenize(sample.parts).tokens
            masked = masked_reference(loaded[0], classes, tokens)
            whole = masked_reference(loaded[0], np.zeros_like(classes), tokens)
            first = len(tokens) - sample.scored_tokens
            found.append(float(np.mean(kl_per_token(whole[first:], masked[first:]))))
        row = rows(made, "search", heads_digest(heads))["full"]
        assert row.value == pytest.approx(np.mean(found), rel=1e-3, abs=1e-6)
        assert row.value > 1e-4


def test_heads_are_profiled_on_text_that_does_not_certify(
    mapped: tuple[PolicyProfile, Path],
) -> None:
    made, _ = mapped
    assert made.heads is not None
    (text,) = json.loads(made.heads.to_json())["evidence"]["texts"]
    read, _ = halves(corpus_of("sotu#first"))
    assert text["digest"] == read.digest
    assert not set(read.documents) & set(corpus_of("sotu#second").documents)


def test_a_profile_with_a_head_map_is_read_again_and_used(
    mapped: tuple[PolicyProfile, Path], loaded: tuple[Any, Any]
) -> None:
    made, _ = mapped
    again = PolicyProfile.from_json(made.to_json())
    assert again == made
    runner = Runner(*loaded, max_tokens=1024, progress=False, check=False, profile=again)
    assert runner.heads == made.heads
    with runner.prefill(list(range(200))) as done:
        assert done.report.policy == "naive"


def test_a_search_of_heads_goes_on_and_comes_out_the_same(
    mapped: tuple[PolicyProfile, Path], runner: Runner, ladder: HeadLadder, tmp_path: Path
) -> None:
    made, log = mapped
    whole = log.read_bytes()
    assert certify(runner, made.bound, effort=SMALL, ladder=ladder, log=log) == made
    assert log.read_bytes() == whole
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(whole[: len(whole) // 2])
    held = runner.cache.stats()["held"]
    assert certify(runner, made.bound, effort=SMALL, ladder=ladder, log=cut) == made
    assert runner.cache.stats()["held"] == held


def test_where_no_head_map_helps_none_is_certified(runner: Runner, ladder: HeadLadder) -> None:
    # Windows of so few tokens that full under them is further off than the bound.
    narrow, bound = replace(ladder, sink=0, recent=16), bound_between(runner)
    made = certify(runner, bound, effort=EFFORT, ladder=narrow)
    assert isinstance(made.chosen, Foresight)
    assert (made.heads, made.kv_share) == (None, 1.0)
    for tried in made.tried_heads:
        search = rows(made, "search", tried.digest)
        assert search.keys() == {"full"}
        assert search["full"].value > bound.value
        assert not rows(made, "certify", tried.digest)
    none = certify(runner, Bound("kl", 1e-12), effort=SMALL, ladder=narrow)
    assert (none.policy, none.heads, none.flops_share, none.kv_share) == ("full", None, 1.0, 1.0)
    assert len(none.tried_heads) == 2


def test_a_score_is_certified_under_a_head_map(ladder: HeadLadder) -> None:
    parts = with_tokenizer()

    def make_runner(heads: HeadClassMap | None) -> Runner:
        return Runner(*parts, max_tokens=4096, progress=False, check=False, heads=heads)

    bound = Bound("score-drop", 0.5, level=0.8)
    effort = Effort((CertifyJob("needle", 384, "plain", 2),), 4, 8, max_new_tokens=4)
    asked = replace(ladder, make_runner=make_runner, tokens=512)
    made = certify(make_runner(None), bound, effort=effort, ladder=asked)
    # A random model finds no number, whatever it is answered by.
    assert made.policy == "naive"
    assert made.heads is not None
    row = rows(made, "certify", heads_digest(made.heads))["naive"]
    assert 0.0 == row.value < row.high <= 0.5
    usual = effort_of(Bound("score-drop", 0.01), find_heads=True)
    assert usual.certify * len(usual.jobs) >= samples_needed(0.01, 1.0 - 0.05 / 4)


def test_ladders_that_are_none(runner: Runner, ladder: HeadLadder, loaded: tuple[Any, Any]) -> None:
    for shares in ((), (0.0,), (1.0,), (0.5, math.nan)):
        with pytest.raises(InvalidArgument, match="head ladder"):
            replace(ladder, shares=shares)
    # Two shares of the same number of heads are one map, and all heads are none.
    counts = [0.26, 0.24, 0.9, 0.01]
    maps = replace(ladder, shares=tuple(counts)).maps(runner, "sotu#first", 0)
    whole = [sum(h["reach"] == "global" for h in json.loads(m.to_json())["heads"]) for m in maps]
    assert whole == [0, 1]
    heads = head_map(runner.spec, classes_of(loaded[0], ((16, 1),)))
    with pytest.raises(InvalidArgument, match="a head map or a ladder of them, got both"):
        certify(
            ladder.make_runner(heads), Bound("kl", 1.0), effort=SMALL, whole=runner, ladder=ladder
        )
    with pytest.raises(InvalidArgument, match="lengths: expected at most"):
        certify(runner, Bound("kl", 1.0), effort=SMALL, ladder=replace(ladder, tokens=10**5))


def test_under_a_head_map_full_is_the_whole_models(runner: Runner, loaded: tuple[Any, Any]) -> None:
    # Local heads that see so little that no policy under them comes near the whole model.
    heads = head_map(runner.spec, classes_of(loaded[0], ((16, 1),)))
    narrow = Runner(*loaded, max_tokens=4096, progress=False, check=False, heads=heads)
    made = certify(narrow, Bound("kl", 1e3), effort=SMALL, whole=runner)
    digest = heads_digest(heads)
    assert made.heads == heads
    assert [tried.digest for tried in made.tried_heads] == [digest]
    assert {e.heads for e in made.evidence} == {digest}
    assert rows(made, "search", digest).keys() >= {"naive", "full"}
    plain = certify(runner, Bound("kl", 1e3), effort=SMALL)
    assert rows(made, "certify", digest)["naive"].value > rows(plain, "certify")["naive"].value
    none = certify(narrow, Bound("kl", 1e-12), effort=SMALL, whole=runner)
    assert (none.policy, none.heads, none.kv_share) == ("full", None, 1.0)
    for wrong in (None, narrow):
        with pytest.raises(InvalidArgument, match="whole runner without a head map"):
            certify(narrow, Bound("kl", 1.0), effort=SMALL, whole=wrong)


@pytest.mark.long
def test_the_command_finds_a_head_map(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    for part in with_tokenizer():
        part.save_pretrained(folder)
    out, log = tmp_path / "profile.json", tmp_path / "log.jsonl"
    words = ("--quick", "--samples", 2, "--find-heads", "--log", log)
    result = call("certify", folder, "--kl", 1e3, *words, "--out", out)
    assert result.exit_code == 0, result.output
    assert "of 4 heads whole is within 1000 nats of KL a token" in result.output
    made = PolicyProfile.read(out)
    assert made.heads is not None
    assert made.kv_share < 1.0
    said = call("generate", "Who?", "--model", folder, "--profile", out, "--max-new-tokens", 1)
    assert said.exit_code == 0, said.output
    none = call("certify", folder, "--kl", 1e-12, *words)
    assert "full, with all heads whole: nothing was found within 1e-12" in none.output
    plain = json.loads(out.read_text())
    plain["heads"]["model_fingerprint"] = "another"
    out.write_text(json.dumps(plain))
    assert "expected a map of model" in refused(
        "generate", "Who?", "--model", folder, "--profile", out
    )
