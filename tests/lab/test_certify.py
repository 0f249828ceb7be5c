"""Certificates: what is within a bound is found, what is not is never certified, runs go on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from certificates import EFFORT, SMALL, bound_between, rows, with_bytes, with_tokenizer
from commands import call, refused
from kvweave.errors import InvalidArgument
from kvweave.lab.eval.corpus import corpus_of
from kvweave.lab.profile import CertifyJob, Effort, certify, effort_of
from kvweave.lab.profile.certifying import ALL_JOBS
from kvweave.policies import Foresight
from kvweave.policies.policy_profile import Bound, PolicyProfile
from kvweave.policies.policy_text import read_policy
from kvweave.runner import Runner


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return with_bytes()


@pytest.fixture(scope="module")
def chatting() -> tuple[Any, Any]:
    return with_tokenizer()


@pytest.fixture(scope="module")
def runner(loaded: tuple[Any, Any]) -> Runner:
    return Runner(*loaded, max_tokens=4096, progress=False, check=False)


@pytest.fixture(scope="module")
def bound(runner: Runner) -> Bound:
    return bound_between(runner)


@pytest.fixture(scope="module")
def tight(
    runner: Runner, bound: Bound, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PolicyProfile, Path]:
    """A certificate of that bound, and the log of its making."""
    log = tmp_path_factory.mktemp("certify") / "log.jsonl"
    return certify(runner, bound, effort=EFFORT, log=log), log


# ---- certificates ----------------------------------------------------------------------------


def test_the_cheapest_within_the_bound_is_certified(tight: tuple[PolicyProfile, Path]) -> None:
    made, _ = tight
    certified = rows(made, "certify")
    assert isinstance(made.chosen, Foresight)
    mine = certified[made.policy]
    assert mine.samples == EFFORT.certify
    assert mine.high <= made.bound.value
    assert mine.flops_share == made.flops_share < 1.0
    for row in certified.values():
        if row.flops_share < mine.flops_share:
            assert row.high is None or row.high > made.bound.value
    search = rows(made, "search")
    assert search["naive"].value > made.bound.value
    shares = [row.flops_share for row in search.values()]
    assert shares == sorted(shares)
    assert all(0 < row.samples <= EFFORT.search for row in search.values())


def test_a_profile_is_read_again_and_used(
    tight: tuple[PolicyProfile, Path], loaded: tuple[Any, Any]
) -> None:
    made, _ = tight
    again = PolicyProfile.from_json(made.to_json())
    assert again == made
    runner = Runner(*loaded, max_tokens=1024, progress=False, check=False, profile=again)
    with runner.prefill(list(range(20))) as done:
        assert done.report.policy == "foresight"


def test_it_is_certified_on_text_that_was_not_searched_on(
    tight: tuple[PolicyProfile, Path],
) -> None:
    made, _ = tight
    first, second = (corpus_of(text.name) for text in made.texts)
    assert [text.digest for text in made.texts] == [first.digest, second.digest]
    assert not set(first.documents) & set(second.documents)
    assert set(first.documents) | set(second.documents) == set(corpus_of("sotu").documents)
    jobs = {e.stage: e.job for e in made.evidence if e.job != ALL_JOBS}
    assert "sotu#first" in jobs["search"]
    assert "sotu#second" in jobs["certify"]


def test_an_interrupted_run_goes_on_and_comes_out_the_same(
    tight: tuple[PolicyProfile, Path], runner: Runner, tmp_path: Path
) -> None:
    made, log = tight
    whole = log.read_bytes()
    assert certify(runner, made.bound, effort=EFFORT, log=log) == made
    assert log.read_bytes() == whole
    cut = tmp_path / "cut.jsonl"
    # In the middle of a line in the middle of the file.
    cut.write_bytes(whole[: len(whole) // 2])
    held = runner.cache.stats()["held"]
    assert certify(runner, made.bound, effort=EFFORT, log=cut) == made
    assert runner.cache.stats()["held"] == held
    with pytest.raises(InvalidArgument, match="seed"):
        certify(runner, made.bound, effort=EFFORT, log=log, seed=1)


def test_where_nothing_is_within_the_bound_it_is_full(runner: Runner) -> None:
    made = certify(runner, Bound("kl", 1e-12), effort=SMALL)
    assert (made.policy, made.flops_share) == ("full", 1.0)
    assert rows(made, "search").keys() >= {"naive", "foresight:share=0.5"}
    assert PolicyProfile.from_json(made.to_json()) == made


def test_where_naive_is_within_the_bound_nothing_dearer_is(runner: Runner) -> None:
    made = certify(runner, Bound("kl", 1e3), effort=SMALL)
    assert made.policy == "naive"
    assert rows(made, "certify")["naive"].high <= 1e3


def test_a_score_is_certified_on_enough_samples_alone(chatting: tuple[Any, Any]) -> None:
    runner = Runner(*chatting, max_tokens=4096, progress=False, check=False)
    bound = Bound("score-drop", 0.5, level=0.8)
    effort = Effort((CertifyJob("needle", 256, "plain", 2),), 4, 6, max_new_tokens=4)
    made = certify(runner, bound, effort=effort)
    row = rows(made, "certify")[made.policy]
    # A random model finds no number, whatever it is answered by.
    assert (made.policy, row.value) == ("naive", 0.0)
    assert 0.0 < row.high <= 0.5
    with pytest.raises(InvalidArgument, match="expected at least 368, .* got 6"):
        certify(runner, Bound("score-drop", 0.01), effort=effort)
    usual = effort_of(Bound("score-drop", 0.01))
    assert usual.certify * len(usual.jobs) >= 368
    with pytest.raises(InvalidArgument, match="tasks with answers, got lm"):
        certify(runner, Bound("score-drop", 0.9), effort=EFFORT)


def test_what_cannot_be_certified_is_refused(loaded: tuple[Any, Any]) -> None:
    mute = Runner(loaded[0], max_tokens=256, progress=False, check=False)
    with pytest.raises(InvalidArgument, match="with a tokenizer"):
        certify(mute, Bound("kl", 1.0), effort=EFFORT)


def test_a_length_that_does_not_hold_the_job_is_said_at_once(runner: Runner) -> None:
    effort = replace(EFFORT, jobs=(CertifyJob("lm", 192, "uneven", 8),))
    admitted = runner.cache.stats()["requests"]
    with pytest.raises(InvalidArgument, match="expected more than 192 tokens"):
        certify(runner, Bound("kl", 1.0), effort=effort)
    assert runner.cache.stats()["requests"] == admitted


# ---- the command -----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "other"), [("f32", "bf16"), ("bf16", "f16")])
def test_a_profile_is_of_a_dtype_that_commands_are_told(
    dtype: str, other: str, chatting: tuple[Any, Any], tmp_path: Path
) -> None:
    for part in chatting:
        part.save_pretrained(tmp_path)
    out, of = tmp_path / "profile.json", ("--dtype", dtype)
    made = call("certify", tmp_path, "--kl", 1e3, "--quick", "--samples", 2, "--out", out, *of)
    assert made.exit_code == 0, made.output
    asked = ("generate", "Who?", "--model", tmp_path, "--profile", out, "--max-new-tokens", 1)
    said = call(*asked, *of)
    assert said.exit_code == 0, said.output
    assert "policy profile" in refused(*asked, "--dtype", other)


def test_the_command_writes_a_profile_that_generate_takes(
    chatting: tuple[Any, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    for part in chatting:
        part.save_pretrained(folder)
    out, words = tmp_path / "made" / "profile.json", ("--quick", "--samples", 2)
    result = call("certify", folder, "--kl", 1e3, *words, "--out", out)
    assert result.exit_code == 0, result.output
    assert "naive is within 1000 nats of KL a token" in result.output
    assert "search" in result.output
    assert PolicyProfile.read(out).chosen == read_policy("naive")
    said = call("generate", "Who?", "--model", folder, "--profile", out, "--max-new-tokens", 1)
    assert said.exit_code == 0, said.output
    plain = json.loads(out.read_text())
    out.write_text(json.dumps({**plain, "model_fingerprint": "another"}))
    assert "expected" in refused("generate", "Who?", "--model", folder, "--profile", out)
    out.write_text(out.read_text()[:100])
    assert "expected JSON" in refused("generate", "Who?", "--model", folder, "--profile", out)


def test_the_command_refuses_what_it_cannot_mean() -> None:
    said = refused("certify", "smollm2")
    assert "expected --kl or --score-drop, got neither; run: kvweave certify smollm2 --kl" in said
    both = ("--kl", 0.1, "--score-drop", 0.1)
    assert "expected --kl or --score-drop, got both" in refused("certify", "smollm2", *both)
    assert "expected a number above 0" in refused("certify", "smollm2", "--kl", -1)
    assert "expected a number above 0" in refused("certify", "smollm2", "--kl", "nan")
    assert "no such file" in refused("certify", "smollm2", "--kl", 1, "--heads", "absent.json")
    beside = ("--find-heads", "--heads", "map.json")
    assert "expected no --heads beside it" in refused("certify", "smollm2", "--kl", 1, *beside)
