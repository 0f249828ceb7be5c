"""Jobs measured on a tiny model: logs that are gone on with, shards, suites, what is counted."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from certificates import with_tokenizer
from commands import call, refused
from eval_samples import measured, without_times
from families import tiny
from kvweave import models
from kvweave.errors import InvalidArgument
from kvweave.lab.eval import (
    SUITES,
    Job,
    Measurement,
    MeasurementLog,
    Sample,
    SampleMeasurer,
    Shard,
    Suite,
    draw,
    evaluate,
    evaluate_suite,
    evaluations_of,
    inserted,
    kl_per_token,
    read_log,
    read_policies,
    suite_of,
    task_of,
    tasks_of,
)
from kvweave.policies.policy_text import titled
from kvweave.runner import Runner, Sampling

POLICIES = read_policies("naive,epic,epic:first=32,sparsex:top_k=1.0")


@pytest.fixture(scope="module")
def runner() -> Runner:
    """A random model of two layers, with words of the real tokenizer."""
    tokenizer = models.load_tokenizer("smollm2")
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=4096)
    return Runner(model, tokenizer, max_tokens=8192, progress=False)


@pytest.fixture
def samples(runner: Runner) -> list[Sample]:
    return draw(task_of("needle", 256), runner.prompts.tokenizer, 3, seed=0)


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_every_sample_of_a_suite_can_be_laid_out(suite: Suite) -> None:
    tokenizer = models.load_tokenizer("smollm2")
    for task, count in tasks_of(suite):
        for sample in draw(task, tokenizer, count, suite.seed):
            ids = [part.tokens or tokenizer(part.text).input_ids for part in sample.segments]
            assert min(map(len, ids)) >= 16


# ---- what is measured ------------------------------------------------------------------------


def test_a_measured_answer_is_the_generated_one(runner: Runner, samples: list[Sample]) -> None:
    """Where full's tokens are the most likely ones nothing is generated, and nothing differs."""
    same = set()
    for index, sample in enumerate(samples):
        with inserted(runner, sample, "ns") as ready:
            measurer = SampleMeasurer(runner, ready, index, "ns", 8, 24)
            how = {"namespace": "ns", "remember": False}
            full = runner.generate(ready.sample.parts, "full", max_new_tokens=24, stop=(), **how)
            for policy in ("full", *POLICIES):
                found = measurer.policy(policy)
                answer = runner.generate(ready.sample.parts, policy, max_new_tokens=8, **how)
                assert found.answer == answer.text
                assert found.same_answer == (answer.tokens == full.tokens[:8])
                longer = runner.generate(
                    ready.sample.parts, policy, max_new_tokens=24, stop=(), **how
                )
                apart = [a != b for a, b in zip(longer.tokens, full.tokens, strict=True)]
                assert found.agreed == (apart.index(True) if True in apart else 24)
                assert found.compared == 24
                same.add(found.same_answer)
    assert same == {True, False}


def test_without_own_answers_only_what_differs_is_not_said(
    runner: Runner, samples: list[Sample]
) -> None:
    differ = set()
    for index, sample in enumerate(samples):
        with inserted(runner, sample, "ns") as ready:
            says = SampleMeasurer(runner, ready, index, "ns", 8)
            silent = SampleMeasurer(runner, ready, index, "ns", 8, own_answers=False)
            for policy in ("full", *POLICIES):
                one, other = says.policy(policy), silent.policy(policy)
                assert other.kl == one.kl
                assert other.agreed == one.agreed
                assert other.same_answer == one.same_answer
                if one.same_answer:
                    assert (other.answer, other.score) == (one.answer, one.score)
                else:
                    assert other.answer == ""
                    assert math.isnan(other.score)
                differ.add(one.same_answer)
    assert differ == {True, False}


def test_beside_a_policy_it_is_its_logits_that_others_are_from(
    runner: Runner, samples: list[Sample]
) -> None:
    """Over the tokens of full's answer, as before."""
    with inserted(runner, samples[0], "ns") as ready:
        measurer = SampleMeasurer(runner, ready, 0, "ns", 8)
        beside = measurer.beside("naive")
        same, full, naive = (
            of.policy(policy)
            for of, policy in ((beside, "naive"), (beside, "full"), (measurer, "naive"))
        )
        assert max(same.kl) == 0.0
        assert (full.top1, len(full.kl)) == (naive.top1, len(naive.kl))
        assert min(max(full.kl), max(naive.kl)) > 0.0
        assert full.kl != naive.kl
        assert measurer.policy("naive").kl == naive.kl


class Forced(Sampling):
    """Says what it is told to, and keeps the logits of each step."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        object.__setattr__(self, "tokens", list(tokens))
        object.__setattr__(self, "seen", [])

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        self.seen.append(logits.float().clone())
        return torch.tensor(self.tokens[len(self.seen) - 1])


def test_kl_is_that_of_decoding_step_by_step(runner: Runner, samples: list[Sample]) -> None:
    with inserted(runner, samples[0], "ns") as ready:
        found = SampleMeasurer(runner, ready, 0, "ns", 8).policy("epic")
        tokens = runner.generate(
            ready.sample.parts, "full", max_new_tokens=8, remember=False
        ).tokens
        steps = {}
        for policy in ("full", "epic"):
            script = Forced(tokens)
            runner.generate(
                ready.sample.parts, policy, max_new_tokens=8, sampling=script, stop=(),
                namespace="ns", remember=False,
            )  # fmt: skip
            steps[policy] = torch.stack(script.seen)
    assert found.kl == pytest.approx(list(kl_per_token(steps["full"], steps["epic"])), abs=1e-5)
    assert max(found.kl) > 1e-3


def test_encoding_pays_after_so_many_uses(runner: Runner) -> None:
    found = evaluate(runner, task_of("needle", 256), POLICIES, samples=2, max_new_tokens=2)
    by_name = {s.policy: s for s in found.summaries()}
    full, naive = found.of("full"), found.of("naive")
    encoding = sum(m.encoding_flops for m in full.values())
    assert encoding > 0
    saved = sum(full[i].flops - naive[i].flops for i in full)
    assert by_name["naive"].pays_after == pytest.approx(encoding / saved)
    assert by_name["naive"].flops_ratio == pytest.approx(
        1 - saved / sum(m.flops for m in full.values())
    )
    assert np.isinf(by_name["full"].pays_after)
    assert by_name["naive"].non_finite == 0
    assert np.isnan(by_name["naive"].peak_bytes)


# ---- logs ------------------------------------------------------------------------------------


floats = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def any_measurement(made) -> Measurement:
    return measured(
        0,
        "naive",
        tuple(made(st.lists(floats, max_size=3))),
        score=made(floats),
        # Half a character, and what some call an end of line.
        answer=made(st.text() | st.just("\udc80\u2028\x85\n")),
        peak_bytes=made(st.none() | st.integers(0, 2**40)),
    )


def same(one: Measurement, other: Measurement) -> bool:
    """Equal, a NaN being itself."""
    return all(repr(getattr(one, f.name)) == repr(getattr(other, f.name)) for f in fields(one))


@given(st.lists(any_measurement(), min_size=2, max_size=3), st.data())
@settings(max_examples=60)
def test_a_log_cut_anywhere_in_its_last_line_goes_on(
    tmp_path_factory: pytest.TempPathFactory, made: list[Measurement], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    log = MeasurementLog(path, {"seed": 1})
    log.define({"a": {"task": "lm"}}, {"naive": "Naive()"})
    made = [replace(m, sample=i) for i, m in enumerate(made)]
    for m in made:
        log.append("a", m.sample, [m])
    whole = path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    path.write_bytes(whole[: data.draw(st.integers(last, len(whole) - 1))])
    assert read_log(path).samples.keys() == {("a", m.sample) for m in made[:-1]}
    again = MeasurementLog(path, {"seed": 1})
    again.define({"a": {"task": "lm"}}, {"naive": "Naive()"})
    for m in made[:-1]:
        assert same(again.measured("a", m.sample)["naive"], m)
    assert again.measured("a", made[-1].sample) == {}
    again.append("a", made[-1].sample, [made[-1]])
    assert path.read_bytes() == whole


def test_a_cut_first_line_is_begun_again_and_another_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    MeasurementLog(path, {"seed": 1})
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        MeasurementLog(path, {"seed": 1})
        assert path.read_bytes() == whole
    path.write_bytes(b"a letter without an end")
    with pytest.raises(InvalidArgument, match="got no whole line"):
        MeasurementLog(path, {"seed": 1})
    assert path.read_bytes() == b"a letter without an end"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda line: {**line, "measurements": [{**line["measurements"][0], "tokens": "many"}]},
        lambda line: {**line, "measurements": [{**line["measurements"][0], "kl": ["much"]}]},
        lambda line: {**line, "measurements": [{**line["measurements"][0], "sample": 9}]},
        lambda line: {**line, "measurements": [{}]},
        lambda line: {"sample": 0},
        lambda line: [line],
        lambda line: None,
    ],
)
def test_logs_of_any_origin_are_refused(spoil, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = MeasurementLog(path, {"seed": 1})
    log.append("a", 0, [measured(0, "naive")])
    *before, line = path.read_bytes().splitlines()
    lines = [*before, json.dumps(spoil(json.loads(line))).encode()]
    path.write_bytes(b"\n".join(lines) + b"\n")
    for read in (read_log, lambda path: MeasurementLog(path, {"seed": 1})):
        with pytest.raises(InvalidArgument, match="expected a log of measurements"):
            read(path)


def test_a_foreign_log_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    MeasurementLog(path, {"model": "a", "seed": 1}).define({"j": {"task": "lm"}}, {"naive": "N(1)"})
    with pytest.raises(InvalidArgument, match="with model = 'b', got 'a'"):
        MeasurementLog(path, {"model": "b", "seed": 1})
    log, before = MeasurementLog(path, {"model": "a", "seed": 1}), path.read_bytes()
    with pytest.raises(InvalidArgument, match="job j with task = 'chain', got 'lm'"):
        log.define({"new": {"task": "lm"}, "j": {"task": "chain"}}, {})
    with pytest.raises(InvalidArgument, match=r"policies with naive = 'N\(2\)', got 'N\(1\)'"):
        log.define({"new": {"task": "lm"}}, {"naive": "N(2)"})
    assert path.read_bytes() == before
    for text, says in ((b"", "got no whole line"), (b'{"schema_version": 1}\n', "schema_version")):
        path.write_bytes(text)
        with pytest.raises(InvalidArgument, match=says):
            read_log(path)


def test_only_what_is_missing_is_measured(runner: Runner, tmp_path: Path) -> None:
    task, log = task_of("needle", 256), tmp_path / "run.jsonl"
    how = {"seed": 0, "max_new_tokens": 4, "controlled": 1, "log": log}
    first = evaluate(runner, task, ["naive"], 2, **how)
    before = log.read_bytes()
    assert evaluate(runner, task, ["naive"], 2, **how) == first
    assert log.read_bytes() == before
    more = evaluate(runner, task, ["epic", "naive"], 3, **how)
    assert log.read_bytes().startswith(before)
    added = [json.loads(line) for line in log.read_bytes()[len(before) :].splitlines()]
    assert added[0] == {"define_policy": "epic", "as": "Epic(first=16)"}
    assert [
        (line["sample"], [m["policy"] for m in line["measurements"]]) for line in added[1:]
    ] == [(0, ["epic"]), (1, ["epic"]), (2, ["full", "naive", "epic"])]
    kept = [m for m in more.measurements if m.policy != "epic" and m.sample < 2]
    assert kept == list(first.measurements)
    assert more.policies == ["full", "chunked (floor)", "naive-no-rope", "naive", "epic"]
    # What was measured and is not asked for is not told of.
    assert evaluate(runner, task, ["naive"], 2, **how) == first
    with pytest.raises(InvalidArgument, match="with max_new_tokens = 5, got 4"):
        evaluate(runner, task, ["naive"], 2, **{**how, "max_new_tokens": 5})


def test_shards_together_are_the_whole(runner: Runner, tmp_path: Path) -> None:
    task, files = task_of("needle", 256), [tmp_path / f"{i}.jsonl" for i in (1, 2, 3)]
    how = {"max_new_tokens": 3, "controlled": 1}
    whole = evaluate(runner, task, POLICIES, 4, **how)
    for number, log in enumerate(files, 1):
        part = evaluate(runner, task, POLICIES, 4, **how, shard=Shard(number, 3), log=log)
        assert {m.sample for m in part.measurements} == {i for i in range(4) if i % 3 == number - 1}
    (together,) = evaluations_of(map(read_log, files))
    assert without_times(together) == without_times(whole)
    assert (together.job, together.task) == (whole.job, whole.task)
    with pytest.raises(InvalidArgument, match="one that has a sample, got 3/3"):
        evaluate(runner, task, POLICIES, 2, shard=Shard(3, 3))


def test_logs_that_mean_different_things_are_not_put_together(tmp_path: Path) -> None:
    for name, told in (("a", "Epic(16)"), ("b", "Epic(8)")):
        MeasurementLog(tmp_path / name, {"seed": 1}).define({"j": {"task": "lm"}}, {"epic": told})
    with pytest.raises(InvalidArgument, match="one meaning of 'epic'"):
        evaluations_of([read_log(tmp_path / "a"), read_log(tmp_path / "b")])


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "½/1", "1e1/20"])
def test_shards_are_numbers_from_one(text: str) -> None:
    with pytest.raises(InvalidArgument, match="shard: expected"):
        Shard.read(text)


@pytest.mark.parametrize(
    ("name", "wrongs"),
    [
        ("samples", (0, -1, 1.5, "3", None, True)),
        ("seed", (-1, 1.5, "3", None)),
        ("max_new_tokens", (0, 1.5, "3", None)),
        ("agreement_tokens", (-1, 1.5, "3", None)),
        ("controlled", (-1, 1.5, "3")),
        ("policies", ("naive", None, 5, [5], ["best"])),
    ],
)
def test_evaluations_of_nothing_are_refused(name: str, wrongs: tuple, runner: Runner) -> None:
    for wrong in wrongs:
        with pytest.raises(InvalidArgument, match=r"^\w+: expected .*, got "):
            evaluate(runner, task_of("needle", 256), **{name: wrong})
    for numbers in ((1.5, 2), (1, "2"), (0, 1), (True, 1)):
        with pytest.raises(InvalidArgument, match="^shard: expected .*, got "):
            Shard(*numbers)


def test_what_files_say_is_told_in_few_words(tmp_path: Path) -> None:
    path, huge = tmp_path / "file.json", "x" * 1_000_000
    for text in (
        json.dumps({"jobs": [{"task": "lm", "length": 8, "samples": 1, huge: 1}]}),
        json.dumps({"jobs": [{"task": "lm", "length": huge, "samples": 1}]}),
        json.dumps([huge]),
    ):
        path.write_text(text)
        with pytest.raises(InvalidArgument) as told:
            suite_of(str(path))
        assert len(str(told.value)) < 1000
    for line in ({"schema_version": huge}, {huge: 1}, [huge]):
        path.write_text(json.dumps(line) + "\n")
        for read in (read_log, lambda log: MeasurementLog(log, {"seed": 1})):
            with pytest.raises(InvalidArgument) as told:
                read(path)
            assert len(str(told.value)) < 1000


# ---- suites ----------------------------------------------------------------------------------


def test_suites_are_tasks_that_exist(runner: Runner) -> None:
    for suite in SUITES:
        assert len(set(suite.jobs)) == len(suite.jobs) == len(tasks_of(suite))
        assert len(titled(read_policies(suite.policies))) == suite.policies.count(",") + 1
        for task, _ in tasks_of(suite):
            (sample,) = draw(task, runner.prompts.tokenizer, 1, suite.seed)
            assert sample.segments
        assert suite_of(suite.name) is suite


def test_a_suite_measures_each_of_its_jobs(runner: Runner, tmp_path: Path) -> None:
    jobs = (Job("needle", 256, 2), Job("lm", 256, 1), Job("needle", 512, 1, None, "uneven", 4))
    suite = Suite("mine", jobs, "naive", max_new_tokens=2, controlled=0)
    found = evaluate_suite(runner, suite, log=tmp_path / "log.jsonl")
    assert [(one.task, len(one.of("naive"))) for one in found] == [
        ("needle", 2), ("lm", 1), ("needle", 1),
    ]  # fmt: skip
    assert len({one.job for one in found}) == 3
    assert [without_times(one) for one in evaluations_of([read_log(tmp_path / "log.jsonl")])] == [
        without_times(one) for one in found
    ]
    with pytest.raises(InvalidArgument, match="expected needle.* once, got it twice"):
        evaluate_suite(runner, replace(suite, jobs=(jobs[0], jobs[0])))


def test_a_suite_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"jobs": [{"task": "lm", "length": 256, "samples": 2}], "controlled": 0}')
    assert suite_of(str(path)) == Suite("mine", (Job("lm", 256, 2),), controlled=0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[]", "a list of jobs, got []"),
        ('{"jobs": []}', "a list of jobs"),
        ('{"jobs": [7]}', "job 1: expected an object, got 7"),
        ('{"jobs": [{"task": "lm", "length": 8}]}', "job 1: expected samples"),
        ('{"jobs": [{"task": "lm", "length": 8, "samples": 0}]}', "samples as a count, got 0"),
        ('{"jobs": [{"task": "lm", "length": true, "samples": 1}]}', "length as a count, got True"),
        ('{"jobs": [{"task": 5, "length": 8, "samples": 1}]}', "task as a word, got 5"),
        ('{"jobs": [{"tusk": "lm"}]}', "one of task, length"),
        ('{"jobs": [{"task": "lm", "length": 8, "samples": 1}], "sed": 1}', "one of name, jobs"),
    ],
)
def test_a_suite_that_says_something_else_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as refusal:
        suite_of(str(path))
    assert says in str(refusal.value)


def test_the_command_refuses_before_a_model_is_loaded(tmp_path: Path) -> None:
    assert "expected one of smoke" in refused("eval", "--suite", "huge")
    assert "s.json" in refused("eval", "--suite", tmp_path / "s.json")
    assert "expected i/n" in refused("eval", "--shard", "2/1")
    assert "one of ratio, spread" in refused("eval", "--policies", "cacheblend:share=1")


@pytest.mark.parametrize(("dtype", "measured"), [(None, "float32"), ("bf16", "bfloat16")])
@pytest.mark.parametrize("suite", [False, True])
def test_the_command_measures_in_a_dtype(
    suite: bool, dtype: str | None, measured: str, tmp_path: Path
) -> None:
    for part in with_tokenizer():
        part.save_pretrained(tmp_path)
    log, words = tmp_path / "log.jsonl", ["--length", 128, "--samples", 1, "--policies", "naive"]
    if suite:
        job = {"task": "lm", "length": 128, "samples": 1}
        path = tmp_path / "small.json"
        path.write_text(json.dumps({"jobs": [job], "policies": "naive"}))
        words = ["--suite", path]
    words += [] if dtype is None else ["--dtype", dtype]
    done = call("eval", "--model", tmp_path, "--log", log, *words)
    assert done.exit_code == 0, done.output
    assert json.loads(log.read_text().splitlines()[0])["dtype"] == measured


@pytest.mark.long
def test_the_smoke_suite_is_measured_and_reported(tmp_path: Path) -> None:
    """The commands from end to end, on the real model."""
    log = tmp_path / "smoke.jsonl"
    done = call("eval", "--suite", "smoke", "--log", log, "--json", tmp_path / "smoke.json")
    assert done.exit_code == 0, done.output
    told = call("report", log, "--out", tmp_path / "out", "--against", "sparsex")
    assert told.exit_code == 0, told.output
    assert max(map(len, told.output.splitlines())) <= 100
    assert "all 2 tasks" in told.output
    data = json.loads((tmp_path / "out/report.json").read_text())
    fresh = json.loads((tmp_path / "smoke.json").read_text())
    assert [s["title"] for s in data["sections"]] == [s["title"] for s in fresh["sections"]]
    assert (tmp_path / "out/gap-closed-over-flops.svg").stat().st_size > 10_000
