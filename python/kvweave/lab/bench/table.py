"""Results as a table for people, rows for records, and JSON for programs."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from kvweave.lab.bench.ceilings import Ceilings
from kvweave.lab.bench.rows import Row
from kvweave.lab.bench.run import Field, Result

if TYPE_CHECKING:
    from rich.table import Table

CASE = "cuda_ops"
"""What the records call this benchmark."""
SCHEMA_VERSION = 1
MICROSECONDS = 1e6
_RATES = {"B": (1e12, "TB/s"), "FLOP": (1e12, "TFLOP/s")}
_COUNTS = {"B": ((1e9, "GB"), (1e6, "MB")), "FLOP": ((1e12, "TFLOP"), (1e9, "GFLOP"))}


def row_of(result: Result) -> Row | None:
    """A row of a record, as the results print it; None where ours has no figure."""
    ours = result.ours
    if ours is None:
        return None
    beside: dict[str, Any] = {"rate": rate(result), "of ceiling": result.share}
    if result.ratios:
        beside["peer ÷ ours"] = _ratios(result)
    if result.case.target is not None:
        beside["target"] = str(result.case.target)
        beside["met"] = _met(result)
    if result.case.cited:
        beside["cited"] = result.case.cited
    return Row(result.name, ours.median_s * MICROSECONDS, "µs", ours.p95_s * MICROSECONDS, beside)


def table_of(results: Sequence[Result]) -> Table:
    """One line a result; a contender without a figure has its reason below the table."""
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption="µs: the median · ceiling: the share of it that is reached",
        caption_justify="left",
    )
    table.add_column("what", overflow="fold")
    for head in ("µs", "p95", "counted", "rate", "ceiling"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("peer ÷ ours", overflow="fold")
    table.add_column("target: met", overflow="fold")
    op = None
    for result in results:
        if result.case.op != op:
            table.add_section()
            op = result.case.op
        table.add_row(*_cells(result))
    return table


def notes_of(results: Sequence[Result], field: Field) -> list[str]:
    """Who is not in the table, and why; what papers say of such cases."""
    lines = [f"{name} is left out: {reason}" for name, reason in field.left_out.items()]
    for result in results:
        if result.case.cited and not result.graph:
            lines.append(f"{result.name}: not measured here: {result.case.cited}")
        lines += [f"{result.name}: {name}: {note}" for name, note in result.notes.items()]
    return lines


def ceilings_line(ceilings: Ceilings) -> str:
    """The ceilings in words."""
    return (
        f"ceilings here: copy {ceilings.copy / 1e12:.2f} TB/s, read {ceilings.read / 1e12:.2f} "
        f"TB/s, bf16 matmul {ceilings.matmul / 1e12:.0f} TFLOP/s, "
        f"empty launch {ceilings.launch_s * MICROSECONDS:.1f} µs"
    )


def document(
    results: Sequence[Result], field: Field, ceilings: Ceilings, device: torch.device
) -> dict[str, Any]:
    """Everything measured, plain data. `rows` are those of a record of `benchmarks/`."""
    rows = []
    for result in results:
        row = row_of(result)
        rows.append({**(asdict(row) if row else {"name": result.name}), "detail": _detail(result)})
    return {
        "schema_version": SCHEMA_VERSION,
        "case": CASE,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(device),
        "ceilings": asdict(ceilings),
        "left_out": field.left_out,
        "rows": rows,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on; the processor is the device that was measured."""
    names = ("kvweave", "torch", "vllm", "flashinfer-python")
    packages = {name: found for name in names if (found := _version(name)) is not None}
    return {
        "processor": torch.cuda.get_device_name(device),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {**packages, "cuda": torch.version.cuda},
    }


def rate(result: Result) -> str:
    """Bytes or FLOPs a second in the bound's own unit; "" without a figure."""
    if result.ours is None:
        return ""
    scale, unit = _RATES[result.bound.unit]
    return f"{result.bound.count / result.ours.median_s / scale:.3g} {unit}"


def _cells(result: Result) -> list[str]:
    ours, share = result.ours, result.share
    scale, unit = _COUNTS[result.bound.unit][result.bound.count < 1e9]
    return [
        result.name,
        "none" if ours is None else f"{ours.median_s * MICROSECONDS:.4g}",
        "" if ours is None else f"{ours.p95_s * MICROSECONDS:.4g}",
        f"{result.bound.count / scale:.4g} {unit}",
        rate(result),
        "" if share is None else f"{share:.0%}",
        _ratios(result),
        "" if result.case.target is None else f"{result.case.target}: {_met(result)}",
    ]


def _ratios(result: Result) -> str:
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in result.ratios.items())


def _met(result: Result) -> str:
    if result.case.target is None:
        return ""
    return {True: "yes", False: "no", None: "not measured"}[result.met]


def _detail(result: Result) -> dict[str, Any]:
    target = result.case.target
    return {
        "op": result.case.op,
        "graph": result.graph,
        "work": {"kind": type(result.case.work).__name__, **asdict(result.case.work)},
        "counted": asdict(result.bound),
        "contenders": {name: asdict(timing) for name, timing in result.timings.items()},
        "ratios": result.ratios,
        "target": None if target is None else asdict(target),
        "met": result.met,
        "notes": result.notes,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
