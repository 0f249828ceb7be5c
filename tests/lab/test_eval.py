"""Evaluation: generators, distances, intervals, and the harness on the real small model."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import models
from kvweave.errors import InvalidArgument
from kvweave.lab.eval import (
    FLOOR,
    Evaluation,
    bootstrap,
    draw,
    evaluate,
    gap_closed,
    kl_per_token,
    task_encoder,
    task_of,
    worst_decile,
)
from kvweave.lab.eval.layout import SEGMENTS
from kvweave.lab.eval.sample import Sample
from kvweave.lab.eval.statistics import negative_log_likelihood
from kvweave.lab.eval.tasks import FOUR_EVEN_SEGMENTS
from kvweave.lab.eval.text import passage, speech, speech_names
from kvweave.runner import Runner, Segment


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer("smollm2")


def written(sample: Sample, tokenizer) -> str:
    """The whole prompt as text."""
    return "".join(
        part
        if isinstance(part, str)
        else part.text
        if part.text is not None
        else tokenizer.decode(part.tokens)
        for part in sample.parts
    )


def length_of(sample: Sample, tokenizer) -> int:
    encode = task_encoder(tokenizer)
    return sum(
        len(part.tokens)
        if isinstance(part, Segment) and part.tokens is not None
        else len(encode(part if isinstance(part, str) else part.text))
        for part in sample.parts
    )


# ---- tasks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOUR_EVEN_SEGMENTS)
def test_samples_depend_on_their_seed_alone(name: str, tokenizer) -> None:
    task = task_of(name, 512)
    three = draw(task, tokenizer, 3, seed=7)
    assert draw(task, tokenizer, 2, seed=7) == three[:2]
    assert draw(task, tokenizer, 3, seed=8) != three
    assert three[0] != three[1]


@pytest.mark.parametrize("name", FOUR_EVEN_SEGMENTS)
@pytest.mark.parametrize("length", [512, 1536])
def test_prompts_have_the_length_asked_for(name: str, length: int, tokenizer) -> None:
    for sample in draw(task_of(name, length), tokenizer, 3, seed=1):
        assert 0.88 * length <= length_of(sample, tokenizer) <= length + 2
        assert len(sample.segments) == SEGMENTS


@pytest.mark.parametrize("name", [name for name in FOUR_EVEN_SEGMENTS if name != "lm"])
def test_answers_stand_in_the_segments_and_not_in_the_question(name: str, tokenizer) -> None:
    for sample in draw(task_of(name, 768), tokenizer, 4, seed=2):
        inside = " ".join(segment.text or "" for segment in sample.segments)
        outside = " ".join(part for part in sample.parts if isinstance(part, str))
        assert sample.answers
        assert len(set(sample.answers)) == len(sample.answers)
        for answer in sample.answers:
            assert re.search(rf"\b{answer}\b", inside)
            assert not re.search(rf"\b{answer}\b", outside)


def test_the_asked_needles_are_tied_to_their_answers(tokenizer) -> None:
    for sample in draw(task_of("needles", 768), tokenizer, 4, seed=3):
        text = written(sample, tokenizer)
        tied = dict(re.findall(r"The special number for (\w+) is (\d+)\.", text))
        assert len(tied) == 8
        asked = re.search(r"special numbers for (.+?) mentioned", text)
        assert asked is not None
        cities = re.split(", | and ", asked[1])
        assert tuple(tied[city] for city in cities) == sample.answers


def test_following_the_chain_gives_the_answers(tokenizer) -> None:
    for sample in draw(task_of("chain", 768), tokenizer, 4, seed=4):
        text = written(sample, tokenizer)
        links = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text))
        wanted = re.search(r"the value (\d+) in the text", text)
        assert wanted is not None

        def value(name: str, links: dict[str, str] = links) -> str:
            return name if name.isdigit() else value(links[name])

        assert {name for name in links if value(name) == wanted[1]} == set(sample.answers)


def test_looked_up_keys_stand_beside_their_values(tokenizer) -> None:
    for sample in draw(task_of("lookups", 768), tokenizer, 4, seed=5):
        text = written(sample, tokenizer)
        table = dict(re.findall(r"^([A-Z][a-z]+-[a-z]+): (\d+)$", text, re.MULTILINE))
        asked = re.search(r"beside the keys (.+?)\?", text)
        assert asked is not None
        assert tuple(table[key] for key in re.split(", | and ", asked[1])) == sample.answers


def test_the_language_model_task_is_one_real_text(tokenizer) -> None:
    (sample,) = draw(task_of("lm", 512), tokenizer, 1, seed=6)
    middle = written(sample, tokenizer).strip("\ufffd")[5:-5]
    assert any(middle in speech(name) for name in speech_names())
    assert not sample.answers
    assert sample.scored_tokens == len(task_encoder(tokenizer)(sample.parts[-1]))


def test_recall_wants_whole_words() -> None:
    sample = Sample(("question",), ("123", "456"))
    assert sample.recall("It is 123, and 456.") == 1.0
    assert sample.recall("It is 1234 and 456") == 0.5
    assert sample.recall("") == 0.0


@pytest.mark.parametrize(
    ("name", "length", "says"),
    [
        ("sums", 512, "expected one of lm"),
        ("lm", 100, "length of at least twice"),
    ],
)
def test_tasks_refuse_what_they_cannot_make(name: str, length: int, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        task_of(name, length)


@pytest.mark.parametrize(("name", "length"), [("needles", 64), ("lookup", 64), ("lookup", 90_000)])
def test_lengths_that_hold_no_prompt_are_refused(name: str, length: int, tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="length"):
        draw(task_of(name, length), tokenizer, 1, 0)


def test_passages_are_whole_paragraphs(tokenizer) -> None:
    encode = task_encoder(tokenizer)
    text = passage("1941-Roosevelt-1", "In the future days", encode, 200)
    assert text.startswith("In the future days, which we seek to make secure")
    assert "freedom of speech" in text
    assert len(encode(text)) <= 200
    assert text in speech("1941-Roosevelt-1")
    with pytest.raises(InvalidArgument, match="no paragraph begins with 'Nothing'"):
        passage("1941-Roosevelt-1", "Nothing", encode, 200)
    with pytest.raises(InvalidArgument, match="1790-Washington-1"):
        speech("1941-Nobody-1")


# ---- distances -------------------------------------------------------------------------------


def test_identical_logits_are_at_no_distance() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    assert (kl_per_token(logits, logits.clone()) == 0.0).all()
    # Logits are defined up to a constant.
    assert kl_per_token(logits, logits + 3.0).max() < 1e-12


def test_kl_against_its_definition() -> None:
    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.1, 0.3, 0.6]])
    expected = 0.7 * np.log(0.7 / 0.1) + 0.2 * np.log(0.2 / 0.3) + 0.1 * np.log(0.1 / 0.6)
    assert kl_per_token(p.log(), q.log())[0] == pytest.approx(expected, rel=1e-6)
    one_hot = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert kl_per_token(one_hot, q.log())[0] == pytest.approx(-np.log(0.1), rel=1e-6)
    assert np.isinf(kl_per_token(q.log(), one_hot)[0])


@given(st.integers(1, 6), st.integers(2, 30), st.integers(0, 2**31))
@settings(max_examples=30)
def test_kl_is_never_negative(n: int, vocabulary: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = (20 * torch.randn(n, vocabulary, generator=generator) for _ in range(2))
    assert (kl_per_token(one, other) >= 0.0).all()


def test_kl_refuses_other_shapes() -> None:
    with pytest.raises(InvalidArgument, match=r"\[2, 3\] and \[2, 4\]"):
        kl_per_token(torch.zeros(2, 3), torch.zeros(2, 4))


def test_negative_log_likelihood_is_cross_entropy() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(1))
    tokens = np.arange(6, dtype=np.int32)
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(6))
    assert negative_log_likelihood(logits, tokens) == pytest.approx(float(expected), rel=1e-6)


def test_worst_decile_is_the_mean_of_the_largest_tenth() -> None:
    assert worst_decile(np.arange(100.0)) == pytest.approx(np.arange(90, 100).mean())
    assert worst_decile(np.array([3.0])) == 3.0
    assert np.isnan(worst_decile(np.zeros(0)))


# ---- intervals -------------------------------------------------------------------------------


def test_gap_closed_follows_its_formula() -> None:
    naive, policy = np.array([0.4, 0.6]), np.array([0.1, 0.15])
    found = bootstrap(np.stack([naive, policy], axis=1), gap_closed)
    assert found.value == pytest.approx(1 - 0.25 / 1.0)
    same = bootstrap(np.stack([naive, naive], axis=1), gap_closed)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    full = bootstrap(np.stack([naive, 0 * naive], axis=1), gap_closed)
    assert (full.value, full.low, full.high) == (1.0, 1.0, 1.0)
    worse = bootstrap(np.stack([naive, 2 * naive], axis=1), gap_closed)
    assert worse.value == pytest.approx(-1.0)
    nothing = bootstrap(np.zeros((3, 2)), gap_closed)
    assert np.isnan([nothing.value, nothing.low, nothing.high]).all()


@pytest.mark.parametrize(("skewed", "least"), [(False, 0.90), (True, 0.85)])
def test_intervals_cover_the_true_mean(skewed: bool, least: float) -> None:
    """Nominal 95 %; twenty skewed samples are known to fall short of it by some per cent."""
    rng = np.random.default_rng(0)
    draws = rng.exponential(1.0, (300, 20)) if skewed else 1.0 + rng.standard_normal((300, 20))
    found = [bootstrap(row, resamples=600, seed=i) for i, row in enumerate(draws)]
    covered = np.mean([f.low <= 1.0 <= f.high for f in found])
    assert least <= covered <= 0.99


def test_wider_confidence_is_wider_and_seeds_decide() -> None:
    values = np.random.default_rng(1).random(15)
    narrow, wide = bootstrap(values, level=0.5), bootstrap(values, level=0.99)
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3)


def test_degenerate_samples() -> None:
    equal = bootstrap([2.0, 2.0, 2.0])
    assert (equal.value, equal.low, equal.high) == (2.0, 2.0, 2.0)
    one = bootstrap([5.0])
    assert one.value == 5.0
    assert np.isnan(one.low)
    assert np.isnan(bootstrap([1.0, np.nan]).value)
    for values in ([], np.zeros((0, 2))):
        with pytest.raises(InvalidArgument, match="at least one sample"):
            bootstrap(values)
    with pytest.raises(InvalidArgument, match="level"):
        bootstrap([1.0, 2.0], level=1.0)


# ---- the harness -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner() -> Runner:
    model, tokenizer = models.load_smollm2()
    return Runner(model, tokenizer, max_tokens=4096, progress=False)


@pytest.fixture(scope="module")
def language(runner: Runner) -> Evaluation:
    return evaluate(runner, task_of("lm", 256), ["naive", "sparsex"], samples=2, seed=0)


def test_language_model_on_the_real_model(runner: Runner, language: Evaluation) -> None:
    found = language
    by_name = {summary.policy: summary for summary in found.summaries()}
    assert list(by_name) == ["full", FLOOR, "naive-no-rope", "naive", "sparsex"]
    assert by_name["full"].kl.value == 0.0
    assert by_name[FLOOR].kl.value < 1e-3
    assert by_name["naive"].kl.value > 10 * by_name[FLOOR].kl.value
    # Accuracy barely notices keys left at old positions; the distance does.
    assert by_name["naive-no-rope"].kl.value > 1.5 * by_name["naive"].kl.value
    assert by_name["sparsex"].kl.value < by_name["naive"].kl.value
    assert 0.0 < by_name["sparsex"].gap_closed.value < 1.0
    assert by_name["naive"].gap_closed.value == 0.0
    assert by_name["naive"].row_share < by_name["sparsex"].row_share < 1.0
    for measured in found.measurements:
        assert len(measured.kl) >= 60
        reused = measured.tokens - measured.recomputed
        assert measured.reused == reused
    assert [m.reused for m in found.measurements if m.role == "full"] == [0, 0]
    assert runner.segments() == []
    runner.cache.check()


@pytest.mark.long
def test_generated_answers_on_the_real_model(runner: Runner) -> None:
    found = evaluate(
        runner, task_of("needle", 512), ["naive"], samples=1, seed=0, max_new_tokens=12
    )
    for measured in found.measurements:
        assert 0.0 <= measured.score <= 1.0
        assert 1 <= len(measured.kl) <= 12
        assert measured.answer
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["policies"][0]["policy"] == "full"
    assert plain["measurements"][0]["kl"] == [0.0] * len(found.measurements[0].kl)
    assert found.table().row_count == 4
    assert runner.segments() == []


def test_the_same_seed_measures_the_same(runner: Runner, language: Evaluation) -> None:
    """What was measured before, and how many samples there are, changes nothing."""
    again = evaluate(runner, task_of("lm", 256), ["naive"], samples=1, seed=0)
    before = {m.policy: m.kl for m in language.measurements if m.sample == 0}
    for measured in again.measurements:
        assert measured.kl == before[measured.policy]


def test_an_interrupted_evaluation_goes_on(
    runner: Runner, language: Evaluation, tmp_path: Path
) -> None:
    """A whole line is kept, a torn one is measured again, and all comes out the same."""
    log = tmp_path / "logs" / "lm.jsonl"
    task = task_of("lm", 256)
    first = evaluate(runner, task, ["naive"], samples=1, seed=0, controlled=1, log=log)
    with log.open("a") as file:
        file.write('{"sample": 1, "measurem')
    both = evaluate(runner, task, ["naive"], samples=2, seed=0, controlled=1, log=log)
    assert [m for m in both.measurements if m.sample == 0] == list(first.measurements)
    assert [m.kl for m in both.measurements if m.policy == "naive"] == [
        m.kl for m in language.measurements if m.policy == "naive"
    ]
    counted = {summary.policy: summary.samples for summary in both.summaries()}
    assert counted == {"full": 2, FLOOR: 1, "naive-no-rope": 1, "naive": 2}
    before = log.read_bytes()
    assert evaluate(runner, task, ["naive"], samples=2, seed=0, controlled=1, log=log) == both
    assert log.read_bytes() == before
    with pytest.raises(InvalidArgument, match="expected measurements with seed = 1, got 0"):
        evaluate(runner, task, ["naive"], samples=1, seed=1, controlled=1, log=log)
    log.write_text('{"an": "essay"}\n[]\n')
    with pytest.raises(InvalidArgument, match="expected a log of measurements"):
        evaluate(runner, task, ["naive"], samples=1, seed=0, log=log)


def test_the_harness_refuses_bad_requests(runner: Runner) -> None:
    with pytest.raises(InvalidArgument, match="samples: expected >= 1"):
        evaluate(runner, task_of("lm", 256), samples=0)
    with pytest.raises(InvalidArgument, match="policy: expected one of"):
        evaluate(runner, task_of("lm", 256), ["magic"])
    assert runner.segments() == []
