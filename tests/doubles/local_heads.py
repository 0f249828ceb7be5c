"""Head maps in which the first heads of each layer keep a window and the others everything."""

from __future__ import annotations

import numpy as np

from head_maps import class_map
from kvweave import HeadClassMap, KvShape


def local_heads(
    shape: KvShape, local: int, sink: int = 16, recent: int = 256, model: str = "m"
) -> HeadClassMap:
    """`local` heads of each layer see a sink and the latest tokens."""
    classes = np.zeros((shape.layers, shape.kv_heads, 2), np.int32)
    classes[:, :local] = (recent, sink)
    return class_map(classes, model)
