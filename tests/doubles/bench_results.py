"""Results of `kvweave bench ops` whose times nothing had to measure."""

from __future__ import annotations

from kvweave.lab.bench.ceilings import Ceilings, bound_of
from kvweave.lab.bench.run import Result
from kvweave.lab.bench.shapes import Case, Decode, Target
from kvweave.lab.bench.timing import Timing

H200 = Ceilings(copy=4.28e12, read=4.36e12, matmul=750e12, launch_s=3.2e-6)


def decode_result(target: Target | None, **microseconds: float) -> Result:
    """Of a decode step, by contender; `_` in a name is a space."""
    timings = {
        name.replace("_", " "): Timing(value * 1e-6, 1.1 * value * 1e-6, 50)
        for name, value in microseconds.items()
    }
    work = Decode(16, 8192)
    case = Case("decode", "decode, B=16, 8K", work, target)
    return Result(case, False, bound_of(work), H200, timings, {})
