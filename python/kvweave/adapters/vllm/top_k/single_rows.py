"""Which requests of a batch decode. Needs no vLLM.

A request whose prompt is not done may have one row too, such as the last token behind a cached
prefix: it reads all, for how prompts are cut depends on who else is in the batch.
"""

from __future__ import annotations

import numpy as np
import torch

from kvweave.adapters.vllm.backend.step_tables import StepBatch, first
from kvweave.adapters.vllm.require import require


def split(
    batch: StepBatch, row_offsets: torch.Tensor, prefilling: torch.Tensor | None
) -> tuple[StepBatch | None, StepBatch | None]:
    """The requests of one row at the head of a batch, and all others.

    `row_offsets` [B + 1] and `prefilling` bool [B], whose prompt is not done, lie on the host.

    Errors: `Unsupported` for a request that decodes behind others that do not: vLLM was asked to
    put it before them.
    """
    if batch.decode:
        return batch, None
    single = np.diff(row_offsets[: batch.requests + 1].numpy()) == 1
    count = int(np.argmin(single))
    if prefilling is not None:
        known = prefilling[: batch.requests].numpy()
        stray = int((single[count : len(known)] & ~known[count:]).sum())
        require("batch", stray == 0, "requests that decode before all others", f"{stray} behind")
    if not count:
        return None, batch
    one = StepBatch(
        count,
        1,
        batch.longest,
        batch.blocks[:count],
        batch.lengths[:count],
        batch.row_offsets[: count + 1],
        batch.slot_mapping[:count],
    )
    others = StepBatch(
        batch.rows - count,
        batch.most_rows,
        batch.longest,
        batch.blocks[count:],
        batch.lengths[count:],
        batch.row_offsets[count:] - count,
        batch.slot_mapping[count:],
    )
    return one, others


class SingleRows:
    """Flags of the requests of one row, at an address that does not change."""

    def __init__(self, device: torch.device, requests: int) -> None:
        self._flags = torch.ones(requests, dtype=torch.bool, device=device)
        self._all = True

    def deciding(self, requests: int, prefilling: torch.Tensor | None) -> torch.Tensor:
        """Bool [B], whose prompts are done; `prefilling` lies on the host, None: nobody's."""
        known = None if prefilling is None else prefilling.numpy()[:requests]
        some = known is not None and bool(known.any())
        if some or not self._all:
            self._flags.fill_(True)
        if some and known is not None:
            self._flags[: len(known)].copy_(torch.from_numpy(~known), non_blocking=True)
        self._all = not some
        return first(self._flags, requests)
