"""Whether a head map is of the model that is served: by the values that it has of its weights.

Before a start they are looked up in the checkpoint's files. In a worker they are compared while
vLLM loads the weights: each rank and each stage sees whole tensors there, by the checkpoint's own
names, before they are sharded, fused, put in another order or quantised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.adapters.vllm.checkpoint import FLOATS, StoredTensors
from kvweave.adapters.vllm.heads.class_map import read_map
from kvweave.weight_sample import WeightComparison, samples_of

if TYPE_CHECKING:
    import torch

NAMELESS = ("dummy", "runai_streamer_sharded", "sharded_state", "tensorizer")
"""Formats of vLLM's whose weights do not come by the names of a checkpoint, if they come at all."""
UNNAMED = "heads: the map does not say of which model it is; whether it is this one's is not known"


def check_files(path: Path, folder: Path) -> str:
    """Compares a map with the safetensors files of a folder; what came of it, as a line to tell.

    Errors: `CorruptHeadMap` for a map of other weights, as `read_map`, and as `StoredTensors.of`.
    """
    compared = WeightComparison(samples := samples_of(read_map(path)))
    if not samples:
        return UNNAMED
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return "heads: no safetensors files here; the map is compared when vLLM loads the weights"
    for file in files:
        tensors = StoredTensors.of(file)
        for name, tensor in tensors.by_name.items():
            sample = compared.sample(name)
            if sample is not None:
                dtype = FLOATS[tensor.dtype][0] if tensor.dtype in FLOATS else None
                compared.see(sample, dtype, tensor.shape, partial(tensors.floats, tensor))
    return f"heads: {compared.told()}"


def watched(
    weights: Iterable[tuple[str, torch.Tensor]], compared: WeightComparison
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by name as they are loaded, each compared with what a map has of it.

    Errors: `CorruptHeadMap` naming the tensor and the first value that is another.
    """
    # A map is checked where no weights are, and no torch wanted.
    from kvweave.runner.model.sampled_weights import see_tensor

    for name, weight in weights:
        sample = compared.sample(name)
        if sample is not None:
            see_tensor(compared, sample, weight)
        yield name, weight
