"""`kvweave bench ops` without a GPU: its data and checks on the CPU, targets, table, JSON, errors.

Times are made up here; that contenders agree is not.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import peer_doubles
from bench_results import H200, decode_result
from benchmarks.report import record, results
from kvweave.cli import app
from kvweave.errors import DeviceUnavailable, InvalidArgument
from kvweave.lab.bench import session, table
from kvweave.lab.bench.ceilings import bound_of
from kvweave.lab.bench.contenders import OURS, PEERS, Contender, fa3, flashinfer
from kvweave.lab.bench.device_timing import FEWEST, FULL, QUICK
from kvweave.lab.bench.pages import PAGE, Shape
from kvweave.lab.bench.problems import Attention, Layers, problem
from kvweave.lab.bench.run import Field, Result, checked, entrants
from kvweave.lab.bench.shapes import (
    CASES,
    OPS,
    SINK,
    WINDOW,
    Copy,
    Decode,
    Merge,
    Prefill,
    Rotate,
    Score,
    Target,
    Work,
    Write,
)

CPU = torch.device("cpu")
TINY, LAYERED = Shape("tiny", 1, 4, 2, 64), Shape("tiny", 2, 4, 2, 64)
WORKS: list[Work] = [
    Decode(3, 640, 2, TINY),
    Decode(1, 640, 2, TINY),
    Decode(2, 640, 1, TINY),
    Decode(2, 640, 2, TINY, fp8=True),
    Prefill(256, shape=TINY),
    Prefill(256, 0.25, 1, TINY),
    Prefill(256, 0.25, 16, TINY),
    Prefill(400, shape=TINY, local=1),
    Copy(LAYERED, 1),
    Copy(LAYERED, 1, "float32", "interleaved"),
    Copy(LAYERED, 1, grouped=True),
    Write(40, TINY),
    Write(400, TINY, local=1),
    Rotate(40, TINY),
    Merge(3, 17, TINY),
    Score(8, 256, TINY),
]
FIELD = Field(("sdpa", "torch"), {})


@pytest.fixture(params=WORKS, ids=str)
def work(request: pytest.FixtureRequest) -> Work:
    return request.param


# ---- data and checks -------------------------------------------------------------------------


def test_ours_and_what_runs_here_agree(work: Work) -> None:
    data, notes = problem(work, CPU), {}
    field = entrants(data, FIELD)
    calls = checked(data, field, notes)
    assert notes == {}
    assert "kvweave" in calls
    alone = isinstance(work, Prefill) and work.local
    assert len(calls) == len(field) == (3 if isinstance(work, Decode) else 1 if alone else 2)


def test_the_check_sees_what_is_wrong_or_not_written(work: Work) -> None:
    data = problem(work, CPU)
    (ours,) = OURS.contenders(data)
    call = ours.prepare()

    def last_element_off() -> torch.Tensor:
        answer = call()
        answer[-1, ..., -1] += 1 + answer[-1, ..., -1].abs()
        return answer

    def part_not_written() -> torch.Tensor:
        answer = call()
        answer[-1] = torch.nan
        return answer

    notes: dict[str, str] = {}
    broken = [
        Contender("off", lambda: last_element_off),
        Contender("nan", lambda: part_not_written),
        Contender("shape", lambda: lambda: torch.zeros(3)),
    ]
    if isinstance(work, Score | Copy):
        broken = broken[1:]
    assert checked(data, broken, notes) == {}
    assert set(notes) == {contender.name for contender in broken}


def test_every_layer_reads_its_own_pages_and_is_checked() -> None:
    data, notes = problem(Decode(1, 640, 1, LAYERED), CPU), {}
    assert isinstance(data, Layers)
    (ours,) = OURS.contenders(data)
    call = ours.prepare()
    first, second = (answer.clone() for answer in call())
    assert not torch.equal(first, second)

    def swapped() -> list[torch.Tensor]:
        return [second, first]

    field = [ours, Contender("swapped", lambda: swapped), Contender("few", lambda: lambda: [first])]
    assert list(checked(data, field, notes)) == ["kvweave"]
    assert notes["swapped"].startswith("wrong answer: row 0")
    assert notes["few"] == "wrong answer: expected 2 layers, got 1"


def test_rows_that_no_sample_holds_are_compared_with_a_peer() -> None:
    data = problem(Prefill(256, shape=TINY), CPU)
    assert isinstance(data, Attention)
    (ours,) = OURS.contenders(data)
    call = ours.prepare()
    sampled = set(np.linspace(0, 255, 12).astype(int).tolist())
    other = next(row for row in range(256) if row not in sampled)

    def one_row_wrong() -> torch.Tensor:
        answer = call().clone()
        answer[other] += 1
        return answer

    notes: dict[str, str] = {}
    field = [ours, Contender("other", lambda: one_row_wrong)]
    assert list(checked(data, field, notes)) == ["kvweave"]
    assert notes["other"].startswith("wrong answer: all rows: expected a relative error <= 0.02")


def test_a_contender_that_raises_costs_its_figure_alone() -> None:
    def prepare() -> None:
        raise MemoryError("no room\nfor details")

    data, notes = problem(Merge(2, 3, TINY), CPU), {}
    field = [Contender("greedy", prepare), *OURS.contenders(data)]
    assert list(checked(data, field, notes)) == ["kvweave"]
    assert notes == {"greedy": "MemoryError: no room"}


def test_a_device_that_died_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def prepare() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    data = problem(Merge(2, 3, TINY), CPU)
    with pytest.raises(DeviceUnavailable, match="reckless stopped the device: RuntimeError: CUDA"):
        checked(data, [Contender("reckless", prepare), *OURS.contenders(data)], {})


# ---- peers that need a GPU, by their declared interfaces -------------------------------------


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library = peer_doubles.fa3_library()
    monkeypatch.setitem(sys.modules, "flashinfer", peer_doubles)
    yield
    library._destroy()


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("work", [w for w in WORKS if isinstance(w, Decode | Prefill)], ids=str)
def test_peers_get_the_same_data(work: Decode | Prefill) -> None:
    data, notes = problem(work, CPU), {}
    peers = [*fa3.contenders(data), *flashinfer.contenders(data)]
    calls = checked(data, [*peers, *OURS.contenders(data)], notes)
    assert notes == {}
    names = {
        (Decode, True): ["FA3", "FA3 NHD", "FlashInfer", "FlashInfer NHD"],
        (Decode, False): ["FA3 head-as-batch", "FlashInfer head-as-batch"],
        (Prefill, True): ["FA3", "FA3 paged"],
        (Prefill, False): ["FA3, a sequence a run"],
    }[type(work), work.dense]
    if isinstance(work, Prefill) and work.local:
        names = ["FA3, full and window apart, no sink", "FA3, all heads full"]
    assert list(calls) == [*names, "kvweave"]


@pytest.mark.usefixtures("doubles")
def test_peers_of_layers() -> None:
    data, notes = problem(Decode(1, 640, 1, LAYERED), CPU), {}
    peers = [*fa3.contenders(data), *flashinfer.contenders(data)]
    assert list(checked(data, [*peers, *OURS.contenders(data)], notes)) == [
        "FA3 head-as-batch",
        "FA3, all heads full",
        "kvweave",
    ]
    assert notes == {}
    full = next(peer for peer in peers if not peer.same).prepare()()
    assert [out.shape for out in full] == [data.each[0].q.shape] * 2


@pytest.mark.usefixtures("doubles")
def test_heads_apart_are_ours_but_for_the_sink() -> None:
    data = problem(Prefill(400, shape=TINY, local=1), CPU)
    assert isinstance(data, Attention)
    (ours,) = OURS.contenders(data)
    apart = next(peer for peer in fa3.contenders(data) if "apart" in peer.name)
    full, near = apart.prepare()()
    wanted = ours.prepare()()
    torch.testing.assert_close(full, wanted[:, :2], rtol=0.02, atol=0.02)
    # Up to there the window reaches the sequence's start.
    torch.testing.assert_close(near[:WINDOW], wanted[:WINDOW, 2:], rtol=0.02, atol=0.02)
    assert not torch.allclose(near[WINDOW + SINK :], wanted[WINDOW + SINK :, 2:], atol=0.02)


def test_peers_say_why_they_are_missing() -> None:
    found = session.field_of(list(PEERS), CPU)
    assert found.peers == ("sdpa", "torch")
    assert found.left_out == {"fa3": "it needs a Hopper GPU", "flashinfer": "it needs a GPU"}


# ---- cases -----------------------------------------------------------------------------------


def test_cases_are_named_once_and_can_be_laid_out() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert WINDOW % PAGE == SINK % PAGE == 0
    for case in CASES:
        if isinstance(case.work, Decode | Prefill | Score):
            assert case.work.tokens % PAGE == 0
            assert case.work.tokens >= WINDOW + SINK


@pytest.mark.parametrize(
    ("name", "microseconds"),
    [
        ("decode, B=32, 16K", 493),
        ("decode, B=16, 8K", 123),
        ("decode, B=1, 8K", 7.7),
        ("decode, B=1, 128K", 123),
        ("ragged decode, 4 of 8 KV heads full, B=1, 32K", 16),
        ("ragged decode, 4 of 8 KV heads full, B=16, 32K", 249),
        ("ragged decode, 1 of 8 KV heads full, B=1, 32K", 4.1),
        ("ragged decode, 1 of 8 KV heads full, B=1, 128K", 15.7),
        ("ragged decode, 1 of 8 KV heads full, B=16, 32K", 66),
    ],
)
def test_bytes_are_what_the_ceiling_allows(name: str, microseconds: float) -> None:
    """Times at 4.36 TB/s that were worked out apart from this program."""
    (case,) = (case for case in CASES if case.name == name)
    assert bound_of(case.work).share(microseconds * 1e-6, H200) == pytest.approx(1.0, abs=0.04)


def test_flops_count_visible_pairs() -> None:
    dense = bound_of(Prefill(4, shape=TINY))
    assert (dense.count, dense.unit) == (4 * 64 * 4 * (1 + 2 + 3 + 4), "FLOP")
    local = bound_of(Prefill(400, shape=TINY, local=1))
    near = sum(min(row + 1, WINDOW) + min(max(row + 1 - WINDOW, 0), SINK) for row in range(400))
    assert local.count == 4 * 64 * 2 * (400 * 401 // 2 + near)
    assert bound_of(Score(2, 4, TINY)).count == 4 * 64 * 4 * (3 + 4)


def test_moved_bytes_count_reads_and_writes() -> None:
    pages = 2 * 2 * PAGE * 64 * 2 * 2
    narrow, wide = (bound_of(Decode(1, 640, 2, TINY, fp8=x)).count for x in (True, False))
    assert wide - narrow == 640 * 2 * 2 * 64
    one, both = (bound_of(Decode(1, 640, 1, shape)) for shape in (TINY, LAYERED))
    assert both.count == 2 * one.count
    copy = Copy(LAYERED, 1)
    assert copy.block_bytes == pages
    assert bound_of(copy).count == 2 * ((1 << 20) // pages) * pages
    assert bound_of(Write(5, TINY)).count == 2 * (2 * 5 * 2 * 64 * 2)
    assert Write(400, TINY, local=1).vectors == 400 + SINK + WINDOW
    assert bound_of(Merge(3, 5, TINY)).count == (3 + 1) * 5 * 4 * (64 * 2 + 4)


def test_effort_is_bounded() -> None:
    assert FULL.rounds(1e-6) == 100
    assert FULL.rounds(0.02) == 25
    assert QUICK.rounds(1e-6) == QUICK.rounds(10.0) == FEWEST


# ---- results ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target("FA3", 1.05), True),
        (Target("FA3", 1.2), False),
        (Target("FA3 NHD", 1.2), True),
        (Target("", 1.05), False),
        (Target("FlashInfer", 1.0), None),
        (None, None),
    ],
)
def test_targets_name_the_fastest_that_they_cover(target: Target | None, met: bool | None) -> None:
    result = decode_result(target, kvweave=130.0, FA3=143.0, FA3_NHD=160.0, SDPA=131.0)
    assert result.met is met
    assert result.ratios["FA3"] == pytest.approx(1.1)


def test_without_a_figure_of_ours_there_is_no_verdict() -> None:
    result = decode_result(Target("FA3", 1.0), FA3=143.0)
    assert (result.ours, result.share, result.ratios, result.met) == (None, None, {}, None)
    assert table.row_of(result) is None


@pytest.fixture
def measured() -> list[Result]:
    good = decode_result(Target("FA3", 1.05), kvweave=130.0, FA3=143.0)
    bad = decode_result(None, FA3=143.0)
    failed = replace(bad, case=replace(bad.case, name="bad"), notes={"kvweave": "wrong answer: x"})
    return [good, replace(good, graph=True), failed]


def test_table_shows_figures_and_reasons(measured: list[Result]) -> None:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as capture:
        console.print(table.table_of(measured))
    text = capture.get()
    line = next(line for line in text.splitlines() if "graph replay" in line)
    for shown in ("130", "143", "537.1 MB", "4.13 TB/s", "95%", "FA3 1.10", "≥ 1.05 × FA3", "yes"):
        assert shown in line
    assert "none" in next(line for line in text.splitlines() if "bad" in line)
    left_out = Field((), {"flashinfer": "flashinfer is not installed"})
    assert table.notes_of(measured, left_out) == [
        "flashinfer is left out: flashinfer is not installed",
        "bad: kvweave: wrong answer: x",
    ]


def test_what_a_paper_says_is_shown_and_never_a_figure(measured: list[Result]) -> None:
    good, replay, _ = measured
    cited = replace(good.case, cited="Paper, Fig. 3: 12.6 ms", target=None)
    results = [replace(result, case=cited) for result in (good, replay)]
    line = "decode, B=16, 8K: not measured here: Paper, Fig. 3: 12.6 ms"
    assert table.notes_of(results, Field((), {})) == [line]
    row = table.row_of(results[0])
    assert row is not None
    assert row.of["cited"] == "Paper, Fig. 3: 12.6 ms"
    assert row.value == pytest.approx(130)
    assert "12.6" not in str(row.of["peer ÷ ours"])


@pytest.fixture
def document(measured: list[Result], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a GPU machine would write."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    properties = SimpleNamespace(total_memory=140 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return table.document(measured, Field((), {"fa3": "absent"}), H200, torch.device("cuda"))


def test_json_says_everything(document: dict[str, object]) -> None:
    again = json.loads(json.dumps(document))
    assert again["schema_version"] == 1
    assert again["case"] == "cuda_ops"
    assert again["left_out"] == {"fa3": "absent"}
    assert again["ceilings"]["read"] == H200.read
    assert again["machine"]["processor"] == "NVIDIA H200"
    good, replay, bad = again["rows"]
    assert good["value"] == pytest.approx(130.0)
    assert good["of"]["met"] == "yes"
    assert good["detail"]["contenders"]["FA3"]["median_s"] == pytest.approx(143e-6)
    assert good["detail"]["work"]["batch"] == 16
    assert good["detail"]["target"] == {"peer": "FA3", "ratio": 1.05}
    assert replay["name"].endswith(", graph replay")
    assert "value" not in bad
    assert bad["detail"]["notes"] == {"kvweave": "wrong answer: x"}


def test_a_gpus_record_reaches_the_results(document: dict[str, object], tmp_path: Path) -> None:
    for commit in ("aaa", "bbb"):
        path = record.keep({**document, "commit": commit}, tmp_path)
    assert path.parent.name == "nvidia-h200"
    assert [run["commit"] for run in json.loads(path.read_text())] == ["aaa", "bbb"]
    shown = results.markdown(results.newest(tmp_path))
    assert "`kvweave bench ops`" in shown
    assert "NVIDIA H200" in shown
    assert "read 4.36 TB/s" in shown
    assert "| decode, B=16, 8K | 130 µs | 143 | 4.13 TB/s | 0.948 | FA3 1.10 |" in shown
    assert "bad" not in shown


def test_parts_of_a_run_are_kept_as_one(document: dict[str, Any]) -> None:
    good, replay, bad = document["rows"]
    parts = [
        {**document, "rows": [good]},
        {**document, "rows": [bad, replay], "time": "2999-01-01"},
    ]
    whole = record.joined(parts)
    assert [row["name"] for row in whole["rows"]] == [row["name"] for row in (good, bad, replay)]
    assert whole["time"] == "2999-01-01"
    assert whole["ceilings"] == [document["ceilings"]] * 2
    with pytest.raises(ValueError, match="rows: expected each once, got decode, B=16, 8K again"):
        record.joined([parts[0], parts[0]])
    for other in ({"case": "ttft"}, {"machine": {**document["machine"], "cores": 0}}):
        with pytest.raises(ValueError, match=f"{next(iter(other))}: expected"):
            record.joined([document, {**parts[1], **other}])


def test_a_part_may_lack_a_package_that_others_had(document: dict[str, Any]) -> None:
    good, replay, _ = document["rows"]
    versions = document["machine"]["packages"]

    def part(row: dict[str, Any], **more: str) -> dict[str, Any]:
        machine = {**document["machine"], "packages": {**versions, **more}}
        return {**document, "machine": machine, "rows": [row]}

    for parts in ([part(good, peer="2"), part(replay)], [part(good), part(replay, peer="2")]):
        assert record.joined(parts)["machine"]["packages"] == {**versions, "peer": "2"}
    with pytest.raises(ValueError, match="machine: expected"):
        record.joined([part(good, peer="2"), part(replay, peer="3")])


def test_ceilings_of_parts_are_shown_as_a_span(document: dict[str, Any], tmp_path: Path) -> None:
    good, replay, _ = document["rows"]
    lower = {**document["ceilings"], "read": 4.1e12}
    whole = [{**document, "rows": [good]}, {**document, "rows": [replay], "ceilings": lower}]
    record.keep({**record.joined(whole), "commit": "aaa"}, tmp_path)
    shown = results.markdown(results.newest(tmp_path))
    assert "Ceilings in the same processes: copy 4.28 TB/s" in shown
    assert "read 4.10 to 4.36 TB/s" in shown


def test_a_record_of_something_else_is_refused(tmp_path: Path, capsys) -> None:
    wrong = tmp_path / "wrong.json"
    for text in ("{}", "[1]", "no json"):
        wrong.write_text(text)
        with pytest.raises(SystemExit):
            record.main([str(wrong)])
        assert "wrong.json: " in capsys.readouterr().err


# ---- the command -----------------------------------------------------------------------------


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["bench", "ops", *words])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def test_the_command_names_what_it_does_not_know() -> None:
    assert f"case: expected one of {', '.join(OPS)}, got 'sums'" in refused("--case", "sums")
    assert "peers: expected one of fa3, flashinfer, sdpa, torch, got 'x'" in refused("--peers", "x")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_the_command_needs_a_gpu() -> None:
    said = refused("--quick")
    assert "error: bench ops: expected a CUDA device, got" in said
    assert said.endswith("; run: kvweave doctor")


def test_cases_are_picked_by_op() -> None:
    assert session.cases_of([]) == CASES
    picked = session.cases_of(["score_tokens", "prefill"])
    assert {case.op for case in picked} == {"score_tokens", "prefill"}
    with pytest.raises(InvalidArgument) as caught:
        session.cases_of(["prefill", ""])
    assert caught.value.got == "''"
