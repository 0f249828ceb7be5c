"""Runs of vLLM's benchmarks: what they are called, what engines are given, and their rows."""

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.report import results
from benchmarks.vllm import engine, ranks, segments, serve
from kvweave.adapters.vllm.serving import engine_options
from kvweave.errors import InvalidArgument
from kvweave.lab.bench.rows import Row


@pytest.mark.parametrize("case", [c for c in results.COMMANDS if c.startswith("vllm")])
def test_printed_commands_make_the_rows_of_their_case(case: str) -> None:
    made = []
    for command in results.COMMANDS[case]:
        python, _, module, *words = shlex.split(command)
        assert python == "python"
        assert (results.ROOT / f"{module.replace('.', '/')}.py").exists()
        if module == "benchmarks.vllm.serve":
            chosen = serve.parser_of_words().parse_args(words)
            assert serve.case_of(chosen.mode, chosen.jobs, chosen.engines, chosen.ranks) == case
            made += serve.tasks(chosen.jobs, chosen.engines, chosen.task)
    names = [row["name"] for row in results.newest()[case]["rows"]]
    for task in made:
        assert any(name.endswith(f": {task.engine}") for name in names)
    counts = {task.requests for task in made if task.job == "throughput"}
    named = {name.split()[1] for name in names if name.startswith("throughput, ")}
    assert named == {str(count) for count in counts}


def test_a_run_of_vllm_is_called_by_its_mode_and_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.case_of("graphs", ["latency", "throughput"]) == "vllm"
    assert serve.case_of("graphs", ["throughput"]) == "vllm_load"
    assert serve.case_of("compiled", ["decode"]) == "vllm_compiled"
    assert serve.case_of("graphs", ["decode"], ["stock", "top_k"]) == "vllm_top_k"
    assert serve.case_of("graphs", ["load"], ["stock", "far"]) == "vllm_far"
    assert serve.case_of("graphs", ["capacity"], ["stock", "mapped"]) == "vllm_mapped"
    assert serve.case_of("graphs", ["capacity"], ["mapped"], ranks=2) == "vllm_mapped_ranks"
    with pytest.raises(InvalidArgument, match="ranks: a run has a record with mode graphs"):
        serve.case_of("compiled", ["capacity"], ["mapped"], ranks=2)
    for mode, jobs in (("compiled", ["latency", "capacity"]), ("eager", ["latency"])):
        with pytest.raises(InvalidArgument, match=f"got mode {mode} with {', '.join(jobs)}"):
            serve.case_of(mode, jobs)
    with pytest.raises(SystemExit):
        serve.main(["--task", '{"mode": "eager"}', "--json", "x.json"])
    assert "got mode eager with latency, capacity" in capsys.readouterr().err


def test_engines_of_vllm_have_the_plugins_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each of vLLM's arguments once."""
    fake = SimpleNamespace(LLM=lambda model, **given: given)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    on_gpu = SimpleNamespace(current_platform=SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setitem(sys.modules, "vllm.platforms", on_gpu)
    heads = {"heads": str(tmp_path / "heads.json")}
    store = {"segment_bytes": 2 << 30}
    chosen = SimpleNamespace(model="Qwen3-32B", tokens=64, arena=2, ranks=1)
    qwen, llama = "Qwen3ForCausalLM", "LlamaForCausalLM"
    for given, wanted in (
        (started("ours", tmp_path), engine_options(qwen)),
        (started("heads", tmp_path), engine_options(qwen, **heads)),
        (segments.engine("segments", tmp_path, chosen), engine_options(qwen, **store)),
        (ranks.engine("heads", tmp_path, 2), engine_options(llama, **heads)),
        (ranks.engine("ours", tmp_path, 2), engine_options(llama)),
    ):
        assert {**given, **wanted} == given
    plain = [started("stock", tmp_path), segments.engine("stock", tmp_path, chosen)]
    assert not any({"additional_config", "attention_config"} & given.keys() for given in plain)


def test_first_tokens_with_segments_are_rows_beside_stocks(tmp_path: Path, monkeypatch) -> None:
    said = {
        "stock": [{"engine": "stock", "what": "stock", "seconds": 1.188, "most": 1.2}],
        "segments": [
            {"engine": "segments", "what": "first", "seconds": 9.0},
            {"engine": "segments", "what": "naive", "seconds": 0.0891, "most": 0.09},
            {"engine": "segments", "what": "sparsex", "seconds": 0.3564, "most": 0.36},
            {"engine": "segments", "what": "store", "requests": 3},
        ],
    }
    monkeypatch.setattr(segments, "lines", lambda _, words: iter(said[words[-1]]))
    monkeypatch.setattr(
        segments, "of_device", lambda case, rows: {"case": case, "rows": rows_as(rows)}
    )
    assert segments.main(["--json", str(tmp_path / "x.json")]) == 0
    run = json.loads((tmp_path / "x.json").read_text())
    known = {row["name"] for row in results.newest()[run["case"]]["rows"]}
    assert {name for name, *_ in run["rows"]} <= known
    assert [figures for _, *figures in run["rows"]] == [
        [1188.0, 1200.0, {}],
        [89.1, 90.0, {"÷ stock": 0.075}],
        [356.4, 360.0, {"÷ stock": 0.3}],
    ]


def rows_as(rows: list[Row]) -> list[list[object]]:
    """Rows as plain lists."""
    return [[row.name, row.value, row.p95, row.of] for row in rows]


def started(name: str, folder: Path) -> dict[str, object]:
    """What vLLM is given for an engine of the benchmark."""
    task = engine.Task(name, "latency", model="Qwen3-32B")
    return engine.started(task, folder, folder / "heads.json", 64, 4)


def test_figures_of_vllm_stand_beside_stocks() -> None:
    step = {"what": "decode", "batch": 1, "tokens": 8, "p95": 0.1}
    found = [
        {"engine": "stock", "mode": "graphs", "what": "start", "seconds": 20.0},
        {**step, "engine": "stock", "mode": "graphs", "seconds": 0.004},
        {**step, "engine": "heads", "mode": "graphs", "seconds": 0.003},
        {**step, "engine": "heads", "mode": "compiled", "seconds": 0.002},
        {"engine": "ours", "mode": "graphs", "what": "failed", "exit": 124},
    ]
    rows = serve.rows_of(found)
    assert [(row.name, row.value, row.p95, row.of) for row in rows] == [
        ("decode step, B=1, 8 tokens: stock", 4.0, 100.0, {}),
        ("decode step, B=1, 8 tokens: heads", 3.0, 100.0, {"÷ stock": 0.75}),
        ("decode step, B=1, 8 tokens, compiled: heads", 2.0, 100.0, {}),
    ]
    assert [task.engine for task in serve.tasks(["capacity"], ["stock", "ours"], {})] == ["stock"]
