"""What the scheduler tells the workers of a step: which pages now lie where."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvweave.adapters.vllm.virtual_pages.far_requests import FarChanges


@dataclass
class PageChanges(KVConnectorMetadata):
    """Changes of a step: i32 [N, 3] of table, virtual page, arena page of its block (0: none).

    `far`: those of pages in the host's memory, which come before them; None where none may be.
    """

    rows: npt.NDArray[np.int32]
    far: FarChanges | None = None
