"""The harness that measures: order, percentiles, records; and that a wrong answer is no result."""

import json
from pathlib import Path

import pytest

from benchmarks import record, results
from benchmarks.cases import attention, block_manager, copy_rerotate
from benchmarks.run import CASES, main
from kvweave.bench.rows import Row, WrongAnswer, expect
from kvweave.bench.timing import compare, summarise


def test_contenders_take_turns_at_being_first() -> None:
    calls: list[str] = []
    names = ("a", "b", "c")
    timed = compare({n: (lambda n=n: calls.append(n)) for n in names}, rounds=3, warm_up=0)
    assert "".join(calls) == "abc" + "bca" + "cab"
    assert {n: t.rounds for n, t in timed.items()} == dict.fromkeys(names, 3)


def test_short_calls_are_repeated_inside_a_sample() -> None:
    calls: list[int] = []
    compare({"a": lambda: calls.append(1)}, rounds=2, at_least_s=1e-3)
    assert len(calls) > 100


def test_median_and_95th_percentile() -> None:
    timing = summarise([float(x) for x in range(1, 102)])
    assert (timing.median_s, timing.p95_s, timing.rounds) == (51.0, 96.0, 101)


def test_a_wrong_answer_is_refused() -> None:
    with pytest.raises(WrongAnswer, match="expected 3, got 4"):
        expect(3 == 4, "expected 3, got 4")


def test_records_of_one_day_are_appended(tmp_path: Path) -> None:
    row = Row("a", 1.5, "ms", None, {"ratio": 2.0})
    first = record.append("case", [row], tmp_path)
    second = record.append("case", [row], tmp_path)
    runs = json.loads(second.read_text())
    assert first == second
    assert len(runs) == 2
    assert runs[0]["rows"] == [
        {"name": "a", "value": 1.5, "unit": "ms", "p95": None, "of": {"ratio": 2.0}}
    ]
    assert runs[0]["machine"]["cores"] >= 1


def test_unknown_cases_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "got nonsense" in capsys.readouterr().err
    assert set(CASES) == {"block_manager", "copy_rerotate", "attention", "ttft", "ttft_cuda"}


@pytest.mark.parametrize("hash_name", list(block_manager.LIMIT_MS))
def test_lookup_case_runs(hash_name: str) -> None:
    row = block_manager.lookup(hash_name, quick=True)
    assert row.value > 0.0


def test_copy_case_checks_and_measures() -> None:
    rows = copy_rerotate.run(quick=True)
    assert len(rows) == 4
    assert all(row.of["MiB"] >= 16 for row in rows)


@pytest.mark.parametrize("name", ["SmolLM2 1024 float32, decode", "Llama-8B 1024 bfloat16, decode"])
def test_attention_case_agrees_with_torch(name: str) -> None:
    attention.check(name, attention.problems(quick=True)[name])


def test_the_readme_shows_the_newest_records() -> None:
    readme = (record.ROOT / "README.md").read_text(encoding="utf-8")
    assert results.filled(readme, results.newest()) == readme


def test_results_are_the_last_run_of_the_last_machine(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        record.append("ttft", [Row("full, 9 tokens", value, "s", 3.0, {"tokens": 9})], tmp_path)
    shown = results.filled(f"# T\n{results.START}old\n{results.END}\n", results.newest(tmp_path))
    assert "| full, 9 tokens | 2 s | 3 |" in shown
    assert "old" not in shown
