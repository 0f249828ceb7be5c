"""What criterion wrote becomes a row: nanoseconds an element, of samples of unlike iterations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.criterion import row_of


@pytest.mark.parametrize("elements", [None, 4])
def test_a_row_is_of_one_element(tmp_path: Path, elements: int | None) -> None:
    throughput = None if elements is None else {"Elements": elements}
    files = {
        "benchmark": {"full_id": "plan/decode/256", "throughput": throughput},
        "estimates": {"median": {"point_estimate": 400.0}},
        "sample": {"iters": [1, 2, 4], "times": [100.0, 800.0, 4000.0]},
    }
    for name, data in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    row = row_of(tmp_path / "benchmark.json")
    of = elements or 1
    assert (row.name, row.unit, row.of) == ("plan/decode/256", "ns", {"elements": of})
    assert row.value == 400.0 / of
    # 100, 400 and 1000 ns an iteration.
    assert row.p95 == pytest.approx((400 + 0.9 * 600) / of)
