"""What the scheduler tells the workers of a step: which pages now lie where."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class PageChanges(KVConnectorMetadata):
    """Changes of a step: i32 [N, 3] of table, virtual page, arena page of its block (0: none)."""

    rows: npt.NDArray[np.int32]
