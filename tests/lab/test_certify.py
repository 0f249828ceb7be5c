"""Certificates: what is within a bound is found, what is not is never certified, runs go on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from byte_tokenizer import Bytes
from commands import call, refused
from eval_samples import measured
from families import tiny
from head_maps import classes_of, head_map
from kvweave import models
from kvweave.errors import InvalidArgument
from kvweave.lab.eval import bootstrap, evaluate
from kvweave.lab.eval.corpus import corpus_of
from kvweave.lab.profile import CertifyJob, Effort, certify, effort_of
from kvweave.lab.profile.certify import ALL_JOBS, _finalists
from kvweave.lab.profile.losses import Losses, samples_needed
from kvweave.policies import Foresight, Naive
from kvweave.policies.policy_profile import Bound, Evidence, PolicyProfile, heads_digest
from kvweave.policies.policy_text import read_policy
from kvweave.runner import Runner

EFFORT = Effort((CertifyJob("lm", 512, "plain", 2),), search=4, certify=6, max_new_tokens=4)
SMALL = replace(EFFORT, search=2, certify=2)


def model_of(vocabulary: int) -> Any:
    """A random model whose attention is sharp enough to tell policies apart."""
    made = tiny("llama", vocab_size=vocabulary, num_hidden_layers=2, max_position_embeddings=4096)
    for layer in made.model.layers:
        layer.self_attn.q_proj.weight.data *= 8.0
        layer.self_attn.k_proj.weight.data *= 8.0
        layer.self_attn.v_proj.weight.data *= 6.0
    return made


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """A model of bytes: with few logits to compute, policies cost what their rows do."""
    return model_of(300), Bytes()


@pytest.fixture(scope="module")
def chatting() -> tuple[Any, Any]:
    """A model with a real tokenizer, for tasks that ask."""
    tokenizer = models.load_tokenizer("smollm2")
    return model_of(len(tokenizer)), tokenizer


@pytest.fixture(scope="module")
def runner(loaded: tuple[Any, Any]) -> Runner:
    return Runner(*loaded, max_tokens=4096, progress=False, check=False)


@pytest.fixture(scope="module")
def bound(runner: Runner) -> Bound:
    """A bound that naive does not keep, and foresight at some budget does."""
    task = EFFORT.jobs[0].on("sotu")
    found = evaluate(runner, task, [Foresight(share=0.35)], 2, controlled=0).summaries()
    naive, mine = (summary.kl.value for summary in found if summary.role == "policy")
    assert mine < 0.5 * naive
    return Bound("kl", math.sqrt(naive * mine))


def rows(made: PolicyProfile, stage: str) -> dict[str, Evidence]:
    """What all jobs came to in a stage, by policy."""
    return {e.policy: e for e in made.evidence if e.stage == stage and e.job == ALL_JOBS}


@pytest.fixture(scope="module")
def tight(
    runner: Runner, bound: Bound, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PolicyProfile, Path]:
    """A certificate of that bound, and the log of its making."""
    log = tmp_path_factory.mktemp("certify") / "log.jsonl"
    return certify(runner, bound, effort=EFFORT, log=log), log


# ---- losses ----------------------------------------------------------------------------------


def losses(kind: str, *jobs: list[float]) -> Losses:
    made = Losses(Naive(), kind)
    for number, values in enumerate(jobs):
        for index, value in enumerate(values):
            full = measured(index, "full", score=1.0)
            mine = measured(index, "naive", (value,), score=1.0 - value)
            made.add(f"job {number}", full, mine)
    return made


def test_an_interval_is_the_bootstraps_over_samples() -> None:
    values = [0.01, 0.02, 0.4, 0.03, 0.05]
    for kind in ("kl", "score-drop"):
        found, wanted = losses(kind, values).interval(0.9), bootstrap(values, level=0.9)
        assert (found.value, found.low, found.high) == pytest.approx(
            (wanted.value, wanted.low, wanted.high)
        )
    both = losses("kl", values, [1.0] * 5)
    assert both.interval(0.9).value == pytest.approx((np.mean(values) + 1.0) / 2)
    assert both.of("job 1").interval(0.9).value == pytest.approx(1.0)
    assert both.flops_share == 0.2


@given(samples=st.integers(2, 60), level=st.floats(0.5, 0.99))
def test_no_loss_seen_is_no_proof_of_none(samples: int, level: float) -> None:
    high = losses("score-drop", [0.0] * samples).interval(level).high
    # A loss in that share of all samples stays unseen with a probability of (1 − level) / 2.
    assert (1.0 - high) ** samples == pytest.approx((1.0 - level) / 2.0)
    needed = samples_needed(high * 1.0001, level)
    assert needed <= samples < needed + 2
    assert losses("score-drop", [-0.5] * samples).interval(level).high >= high


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_within_no_bound(value: float) -> None:
    made = losses("kl", [0.0] * 9 + [value])
    assert made.lost == 1
    assert made.surely_above(1e9)
    assert made.interval(0.95).high == math.inf


def test_what_is_far_above_is_given_up_early() -> None:
    assert losses("kl", [0.5] * 4).surely_above(0.05)
    assert not losses("kl", [0.05] * 60).surely_above(0.05)
    assert losses("score-drop", [1.0] * 30).surely_above(0.01)
    assert not losses("score-drop", [0.5, -0.5] * 30).surely_above(0.01)


@pytest.mark.parametrize(
    ("kls", "wanted"),
    [
        # Each candidate's KL, of a bound of 1, the cheapest first; noise of 2 %.
        ((2.0, 0.8, 0.79, 0.78, 0.6, 0.3), [0.8, 0.6, 0.3]),
        ((0.9, 0.2), [0.9, 0.2]),
        ((0.1, 0.05), [0.1]),
        ((1.2, 0.99), [0.99]),
        ((1.2, 1.1), []),
    ],
)
def test_finalists_are_within_the_bound_by_more_and_by_less(
    kls: tuple[float, ...], wanted: list[float]
) -> None:
    """Those of one margin are alike, and would fail together."""
    seen = []
    for number, kl in enumerate(kls, 1):
        one = Losses(Foresight(share=kl / 4), "kl")
        for sample in range(8):
            noisy = kl * (1.0 + 0.02 * (-1) ** sample)
            full, mine = measured(sample, "full"), measured(sample, "foresight", (noisy,))
            one.add("job", full, replace(mine, flops=100 * number))
        seen.append(one)
    found = _finalists(seen[::-1], Bound("kl", 1.0), EFFORT)
    assert [policy.share * 4 for policy in found] == pytest.approx(wanted)


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


def test_under_a_head_map_full_is_the_whole_models(runner: Runner, loaded: tuple[Any, Any]) -> None:
    # Local heads that see so little that no policy under them comes near the whole model.
    heads = head_map(runner.spec, classes_of(loaded[0], ((16, 1),)))
    narrow = Runner(*loaded, max_tokens=4096, progress=False, check=False, heads=heads)
    made = certify(narrow, Bound("kl", 1e3), effort=SMALL, whole=runner)
    assert made.heads == heads_digest(heads)
    plain = certify(runner, Bound("kl", 1e3), effort=SMALL)
    assert rows(made, "certify")["naive"].value > rows(plain, "certify")["naive"].value
    for wrong in (None, narrow):
        with pytest.raises(InvalidArgument, match="whole runner without a head map"):
            certify(narrow, Bound("kl", 1.0), effort=SMALL, whole=wrong)


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
    assert "expected --kl or --score-drop" in refused("certify", "smollm2")
    both = ("--kl", 0.1, "--score-drop", 0.1)
    assert "expected --kl or --score-drop" in refused("certify", "smollm2", *both)
    assert "expected a number above 0" in refused("certify", "smollm2", "--kl", -1)
    assert "expected a number above 0" in refused("certify", "smollm2", "--kl", "nan")
    assert "no such file" in refused("certify", "smollm2", "--kl", 1, "--heads", "absent.json")
