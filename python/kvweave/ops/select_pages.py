"""The pages that a decode step reads."""

from __future__ import annotations

import torch

from kvweave import _native
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import (
    Backend,
    Table,
    counted,
    cuda_device,
    expect_tensors,
    invalid,
    numbers_of,
    on_device,
    stream_of,
)


@needs_memory("select_pages")
def select_pages(
    scores: torch.Tensor,
    counts: Table,
    budgets: Table,
    *,
    sink: int = 0,
    recent: int = 0,
    most: int | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the pages that each row lists, those that a decode step reads.

    scores f32 [R, S], of which the first counts i32 [R] are a row's; budgets i32 [R]: how many it
    selects at most, from `sink` + `recent` on. The first `sink` and the last `recent` are always
    selected, then the best by score (FlexiCache, section 3.2, after Quest). A higher score goes
    first, of equal ones the lower index, and NaN before all, so that a page with NaN keys is read
    and not passed over in silence. A row's answer depends on that row alone. A row with no more
    pages than its budget selects all.

    Returns pages i32 [R, K], ascending with −1 behind them, K being `most` or else the largest
    budget, and selected i32 [R]: how many. K has to be said where budgets lie on a CUDA device, as
    nothing waits to look there. In tables there, a count beyond S is S, and pages that K leaves no
    room for are left out.
    """
    expect_tensors(scores=scores)
    device = cuda_device("scores", scores, backend)
    widest = _largest(budgets) if most is None else counted("most", most)
    rows = scores.shape[:1] if scores.ndim else (0,)
    pages = scores.new_empty((*rows, widest), dtype=torch.int32)
    selected = scores.new_empty(rows, dtype=torch.int32)
    always, results = (sink, recent), (pages, selected)
    if device is None:
        _native.select_pages(scores, counts, budgets, always, results, backend == "reference")
        return pages, selected
    tables = on_device(device, counts=counts, budgets=budgets)
    listed, limits = tables["counts"], tables["budgets"]
    _native.select_pages_cuda(scores, listed, limits, always, results, stream_of(device))
    return pages, selected


def _largest(budgets: Table) -> int:
    """The largest budget; no less than 0, whatever the op itself will say of it."""
    if isinstance(budgets, torch.Tensor) and budgets.is_cuda:
        raise invalid("most", "the largest budget, as budgets lie on cuda", "None")
    return max(0, int(numbers_of("budgets", budgets).max(initial=0)))
