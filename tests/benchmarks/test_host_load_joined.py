"""Runs of the load over host memory by processes of their own, vLLM's among them, as one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import host_load
from benchmarks.heard import Heard, figures
from benchmarks.load import told
from benchmarks.report import record
from benchmarks.vllm import serve
from kvweave.lab.bench.rows import Row

MACHINE: dict[str, Any] = {"processor": "one", "packages": {"torch": "2"}}
FIGURES = ("tokens in and out", "first token", "between tokens")


def kept(path: Path, rows: list[Row], case: str, **packages: str) -> str:
    """The file of a run, as processes on one machine write theirs."""
    machine = {**MACHINE, "packages": {**MACHINE["packages"], **packages}}
    path.write_text(json.dumps({**record.here(case, rows), "machine": machine}))
    return str(path)


def of_vllm(loads: list[str]) -> list[Row]:
    """What `benchmarks.vllm.serve` makes of loads that vLLM has answered."""
    heard = [Heard(100, 0.0, [1.0, 1.5, 2.0]), Heard(140, 0.0, [2.0, 2.5])]
    known = {"engine": "stock", "job": "load", "mode": "graphs", "what": "row"}
    return serve.rows_of(
        [{**known, **told(row)} for load in loads for row in figures(load, heard, {})]
    )


def joined(files: list[str], path: Path, case: str) -> dict[str, Row]:
    assert host_load.main(["--join", *files, "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    assert run["case"] == case
    rows = [Row(**row) for row in run["rows"]]
    return {row.name: row for row in rows}


def test_contenders_of_processes_of_their_own_are_set_beside_each_other(tmp_path: Path) -> None:
    """Of both ways to come, those of vLLM too, by the names that its rows have."""
    task = replace(host_load.QUICK, rate=100.0)
    own = {"all": replace(task, copies=()), "over": replace(task, whole=False, copies=("cadence",))}
    files = [
        kept(tmp_path / name, host_load.rows_of(some, pages=4), "host_load")
        for name, some in own.items()
    ]
    loads = [
        f"tiny Llama, 4 of 80 to 160, 8 to 40 out, {way}" for way in ("at once", "Poisson at 100/s")
    ]
    files.append(kept(tmp_path / "stock", of_vllm(loads), "vllm_load", vllm="0.33.0"))
    rows = joined(files, tmp_path / "joined", "host_load_whole")
    assert len(rows) == 18
    for load in loads:
        for figure in FIGURES:
            over = rows[f"{load}: over the host, cadence: {figure}"]
            for key, name in (
                ("× all", f"{load}: all: {figure}"),
                ("× vLLM", f"{load}: {figure}: stock"),
            ):
                assert over.of[key] == host_load.better(over, rows[name].value, over.value)
        over, stock = (
            rows[f"{load}: {what}"]
            for what in ("over the host, cadence: between tokens", "between tokens: stock")
        )
        assert over.of["× vLLM, a token"] == stock.of["a token"] / over.of["a token"]
        assert stock.of["a token"] == 500.0


def test_one_way_alone_is_joined(tmp_path: Path) -> None:
    load = "tiny Llama, 4 of 80 to 160, 8 to 40 out, at once"
    task = replace(host_load.QUICK, ways=("at once",), copies=())
    files = [kept(tmp_path / "all", host_load.rows_of(task, pages=4), "host_load")]
    files.append(kept(tmp_path / "stock", of_vllm([load]), "vllm_load"))
    rows = joined(files, tmp_path / "joined", "host_load_at_once")
    assert set(rows) == {f"{load}: all: {figure}" for figure in FIGURES} | {
        f"{load}: {figure}: stock" for figure in FIGURES
    }
    first = rows[f"{load}: all: first token"]
    assert first.of["× vLLM"] == 1.5 / first.value


def test_versions_that_vllm_had_are_told_apart_and_our_own_have_to_be_the_same(
    tmp_path: Path,
) -> None:
    row = Row("a, Poisson at 1/s: all: tokens in and out", 1.0, "tokens/s", None, {})
    over = Row("a, Poisson at 1/s: over the host: tokens in and out", 2.0, "tokens/s", None, {})
    files = [kept(tmp_path / "all", [row], "host_load")]
    load = "a, Poisson at 1/s"
    files.append(kept(tmp_path / "stock", of_vllm([load]), "vllm_load", torch="3", vllm="0.33.0"))
    rows = joined(files, tmp_path / "joined", "host_load_whole")
    assert rows[row.name].of["× vLLM"] == 1.0 / rows[f"{load}: tokens in and out: stock"].value
    packages = json.loads((tmp_path / "joined").read_text())["machine"]["packages"]
    assert packages == {"torch": "2", "torch of vLLM": "3", "vllm": "0.33.0"}
    files.append(kept(tmp_path / "over", [over], "host_load", torch="4"))
    with pytest.raises(ValueError, match="machine: expected"):
        host_load.main(["--join", *files, "--json", str(tmp_path / "joined")])
