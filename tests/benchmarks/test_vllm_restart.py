"""The benchmark of a vLLM that starts again: what engines are given, and the rows of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.vllm import restart


def given(folder: Path) -> argparse.Namespace:
    return restart.parser_of_words().parse_args([str(folder), "--documents", "4"])


def test_each_engine_keeps_in_a_folder_of_its_own(tmp_path: Path) -> None:
    def tier(name: str) -> dict[str, Any]:
        extra = restart.options(name, given(tmp_path))["kv_transfer_config"]
        (found,) = extra["kv_connector_extra_config"].pop("secondary_tiers")
        return {**found, "extra": extra["kv_connector_extra_config"]}

    assert restart.options("stock", given(tmp_path)) == {}
    kept = restart.options("kept", given(tmp_path))["additional_config"]["kvweave"]
    assert kept["store"] == str(tmp_path / "kept")
    ours, theirs = tier("tier"), tier("fs")
    assert (ours["type"], ours["folder"]) == ("StoreTier", str(tmp_path / "tier"))
    assert (theirs["type"], theirs["root_dir"]) == ("fs", str(tmp_path / "fs"))
    assert ours["extra"] == theirs["extra"]


def test_a_run_has_a_row_for_each_engine_beside_stocks(tmp_path: Path, monkeypatch) -> None:
    """Each is started twice, but for stock, which keeps nothing."""
    started = []

    def lines(_: str, words: list[str]) -> list[dict[str, Any]]:
        name, phase = words[-1], words[-3]
        started.append((name, phase))
        if phase == "first":
            return [{"engine": name, "phase": phase, "what": "kept", "seconds": 9.0}]
        seconds = {"stock": 0.4}.get(name, 0.1)
        ttft = {"engine": name, "phase": phase, "what": "ttft", "seconds": seconds, "most": 0.5}
        return [ttft, {"engine": name, "phase": phase, "what": "reads", "reads direct": 16}]

    monkeypatch.setattr(restart, "lines", lines)
    monkeypatch.setattr(
        restart, "of_device", lambda case, rows: {"case": case, "rows": [vars(r) for r in rows]}
    )
    words = [str(tmp_path), "--documents", "4", "--json", str(tmp_path / "x.json")]
    assert restart.main(words) == 0
    again = [(name, phase) for name in restart.ENGINES for phase in restart.PHASES]
    assert started == again[1:]
    run = json.loads((tmp_path / "x.json").read_text())
    assert run["case"] == "vllm_restart"
    assert [row["value"] for row in run["rows"]] == [400.0, 100.0, 100.0, 100.0]
    assert [row["of"].get("÷ stock") for row in run["rows"]] == [None, 0.25, 0.25, 0.25]
    assert run["rows"][1]["of"]["reads direct"] == 16
