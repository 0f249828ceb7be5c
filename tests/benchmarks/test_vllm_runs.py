"""Runs of vLLM's benchmarks: what they are called, what engines are given, and their rows."""

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.report import results
from benchmarks.report.commands import COMMANDS
from benchmarks.vllm import engine, kv_bytes, ranks, segments, serve
from kvweave.adapters.vllm.serving import engine_options
from kvweave.errors import InvalidArgument
from kvweave.lab.bench.rows import Row

RECORDED = [c for c in results.newest() if c in COMMANDS and c.startswith("vllm")]


@pytest.mark.parametrize("case", RECORDED)
def test_printed_commands_make_the_rows_of_their_case(case: str) -> None:
    made = []
    for command in COMMANDS[case]:
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
    if not made:
        return
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


def test_requests_of_all_engines_come_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once and then by Poisson: rows of their own, beside the first engine's."""
    tasks: list[engine.Task] = []

    def found_by(task: engine.Task, limit: float) -> list[dict[str, object]]:
        tasks.append(task)
        said = {"engine": task.engine, "mode": "graphs", "job": task.job, "requests": 3}
        rate, lines = task.rate or 0.4, list[dict[str, object]]()
        for come, arrivals in (("", 0.0), (", Poisson", rate)):
            known = {**said, "come": come, "arrivals_s": arrivals}
            part = 2.0 if task.engine == "far" else 1.0
            whole = {"read": 90, "said": 9, "seconds": 3.0, "out_s": 3.0, "requests_s": 0.5}
            lines.append({**known, "what": "throughput", "rate": 33.0 * part, **whole})
            spread = {"value": 8.0 / part, "p95": 9.0, "p99": 10.0, "worst": 11.0}
            lines += [{**known, "what": what, **spread} for what in ("first", "between")]
            lines.append({**known, "what": "device", "bytes": serve.GIB * part, "mean": 1.0})
        return lines

    said: dict[str, Row] = {}
    rows_of = serve.rows_of

    def noted(found: list[dict[str, object]]) -> list[Row]:
        rows = rows_of(found)
        said.update({row.name: row for row in rows})
        return rows

    monkeypatch.setattr(serve, "found_by", found_by)
    monkeypatch.setattr(serve, "rows_of", noted)
    words = ["--jobs", "throughput", "--engines", "stock", "far", "--task", '{"poisson": true}']
    assert serve.main(words) == 0
    assert [(task.engine, task.rate) for task in tasks] == [("stock", 0.0), ("far", 0.4)]
    assert said["throughput, 3 requests: far"].of["÷ stock"] == 2.0
    assert said["between tokens, 3 requests, Poisson: far"].of["÷ stock"] == 0.5
    device = said["KV on the device at most, 3 requests, Poisson: far"]
    assert (device.value, device.unit, device.of["arrivals_s"]) == (2.0, "GiB", 0.4)


def test_the_device_is_looked_at_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the arena's own count where there is one, else by vLLM's share of its blocks."""
    sizes = iter([3.0, 5.0, 4.0])
    monkeypatch.setattr(kv_bytes, "EVERY_S", 0.0)
    watched = kv_bytes.Watched(lambda: iter([("0", 1)]), lambda: next(sizes))
    assert [list(watched()) for _ in range(3)] == [[("0", 1)]] * 3
    assert watched.taken() == {"bytes": 5.0, "mean": 4.0}
    assert watched.taken() == {"bytes": 0.0, "mean": 0.0}
    task = engine.Task("stock", "throughput")
    assert engine.block_bytes(task) == 16 * 131072

    def sample(name: str, value: float, **labels: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, value=value, labels=labels)

    of_vllm = [sample(kv_bytes.USED, 0.25), sample(kv_bytes.POOL, 1, num_gpu_blocks="80")]
    assert kv_bytes.held_of(of_vllm, 100) == 2000.0
    sizes_of = [("device", "resident", 5), ("device", "slots", 2), ("device", "free", 50)]
    ours = [
        sample(kv_bytes.OURS, size, tier=tier, state=state)
        for tier, state, size in [*sizes_of, ("host", "held", 70)]
    ]
    assert kv_bytes.held_of([*of_vllm, *ours], 100) == 7.0
