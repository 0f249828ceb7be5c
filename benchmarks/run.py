"""Runs benchmark cases: `python -m benchmarks.run [CASE ...] [--quick] [--record]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cases import (
    attention,
    block_manager,
    block_moves,
    choices,
    copy_rerotate,
    decode_host,
    engine_load,
    hand_off,
    head_memory,
    host_load,
    isolation,
    packed_capacity,
    packed_copies,
    packed_decode,
    packed_kinds,
    packed_load,
    packed_prefill,
    packed_prefill_final,
    packed_rows,
    packed_step,
    packed_worker,
    packed_worker_final,
    page_choice,
    page_moves,
    rotate_rows,
    scheduler,
    speculation,
    speculation_text,
    store,
    tiers,
    top_k_step,
    ttft,
    ttft_cuda,
    ttft_heads,
    ttft_packed,
    workflow,
    zeroing,
)
from benchmarks.report import record
from kvweave.lab.bench.rows import Row

Case = Callable[[bool], list[Row]]
CASES: dict[str, Case] = {
    "block_manager": block_manager.run,
    "scheduler": scheduler.run,
    "copy_rerotate": copy_rerotate.run,
    "rotate_rows": rotate_rows.run,
    "decode_host": decode_host.run,
    "engine_load": engine_load.run,
    "host_load": host_load.run,
    "attention": attention.run,
    "store": store.run,
    "tiers": tiers.run,
    "choices": choices.run,
    "hand_off": hand_off.run,
    "workflow": workflow.run,
    "isolation": isolation.run,
    "zeroing": zeroing.run,
    "ttft": ttft.run,
    "ttft_cuda": ttft_cuda.run,
    "ttft_heads": ttft_heads.run,
    "ttft_packed": ttft_packed.run,
    "ttft_packed_parts": ttft_packed.parts,
    "head_memory": head_memory.run,
    "page_choice": page_choice.run,
    "page_moves": page_moves.run,
    "block_moves": block_moves.run,
    "packed_copies": packed_copies.run,
    "packed_decode": packed_decode.run,
    "packed_prefill": packed_prefill.run,
    "packed_prefill_final": packed_prefill_final.run,
    "packed_step": packed_step.run,
    "packed_kinds": packed_kinds.run,
    "packed_load": packed_load.run,
    "packed_worker": packed_worker.run,
    "packed_worker_final": packed_worker_final.run,
    "packed_worker_whole": packed_worker_final.whole,
    "packed_capacity": packed_capacity.run,
    "packed_rows": packed_rows.run,
    "top_k_step": top_k_step.run,
    "top_k_step_half": top_k_step.run_half,
    "top_k_cadence": top_k_step.run_cadence,
    "speculation": speculation.run,
    "speculation_text": speculation_text.run,
}
ON_A_GPU = {
    "block_moves",
    "packed_copies",
    "packed_decode",
    "page_choice",
    "page_moves",
    "speculation",
    "top_k_step",
    "top_k_step_half",
    "top_k_cadence",
    "ttft_cuda",
    "ttft_heads",
}
# Cases that run on a GPU where there is one.
ON_A_GPU_IF_ANY = {
    "hand_off",
    "packed_capacity",
    "packed_kinds",
    "packed_load",
    "packed_prefill",
    "packed_prefill_final",
    "packed_rows",
    "packed_step",
    "packed_worker",
    "packed_worker_final",
    "packed_worker_whole",
    "speculation_text",
    "tiers",
    "ttft_packed",
    "ttft_packed_parts",
}
# Cases of bytes alone: another program beside them changes nothing.
UNTIMED = {"head_memory"}


def show(case: str, rows: list[Row], console: Console) -> None:
    """One table: the figure, its spread, and what the case wants beside it."""
    beside = list(dict.fromkeys(key for row in rows for key in row.of))
    table = Table("what", "median", "p95", "unit", *beside, title=case)
    for column in table.columns[1:3]:
        column.justify = "right"
    for row in rows:
        p95 = "" if row.p95 is None else _figure(row.p95)
        cells = [_figure(row.of[key]) if key in row.of else "" for key in beside]
        table.add_row(row.name, _figure(row.value), p95, row.unit, *cells)
    console.print(table)


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and value < 1000 else f"{value}"


def kept(case: str, rows: list[Row]) -> Path:
    """Adds a run to the records of the GPU where the case runs on one, else of this machine."""
    on_a_gpu = case in ON_A_GPU or (case in ON_A_GPU_IF_ANY and torch.cuda.is_available())
    return record.keep((record.of_device if on_a_gpu else record.here)(case, rows))


def main(words: list[str] | None = None) -> int:
    """Runs the named cases (default: all); returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__)
    parser.add_argument("case", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/records")
    chosen = parser.parse_args(words)
    unknown = [case for case in chosen.case if case not in CASES]
    if unknown:
        parser.error(f"expected cases of {', '.join(CASES)}, got {', '.join(unknown)}")
    has_gpu = torch.cuda.is_available()
    if not has_gpu and ON_A_GPU & set(chosen.case):
        parser.error(f"{', '.join(ON_A_GPU & set(chosen.case))}: expected a GPU, got none")
    if chosen.record and chosen.quick:
        parser.error("--record with --quick")
    if chosen.record and not UNTIMED.issuperset(chosen.case or CASES) and record.busy():
        parser.error(record.busy())
    console = Console(width=None if sys.stdout.isatty() else 150)
    for case in chosen.case or [case for case in CASES if has_gpu or case not in ON_A_GPU]:
        rows = CASES[case](chosen.quick)
        show(case, rows, console)
        if chosen.record:
            console.print(f"recorded in {kept(case, rows).relative_to(record.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
