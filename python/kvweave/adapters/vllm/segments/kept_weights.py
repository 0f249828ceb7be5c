"""`KeptWeights`: whether weights that are loaded again are those that a folder's documents are of.

A running engine may load weights anew: its own, which a deep sleep gave back, or others, as in
training. A folder knows its model by the files of the start, and what is loaded later may come from
anywhere. So a few values of each tensor of these files are kept, and compared with what comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from kvweave.adapters.vllm.checkpoint import FLOATS, StoredTensors
from kvweave.errors import KvweaveError
from kvweave.runner.model.sampled_weights import see_tensor
from kvweave.weight_sample import WeightComparison, WeightSample, places, plain_name

VALUES = 8
"""Of each tensor; there are hundreds."""


class KeptWeights:
    """The weights of the safetensors files among `files`; what cannot be compared is another's.

    `are_same`: whether all that has been loaded again since is of these.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._compared = WeightComparison(
            sample for file in files if file.suffix == ".safetensors" for sample in _samples(file)
        )
        self.are_same = True

    def watched(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by name as they are loaded, each compared with what the files had of it."""
        for name, weight in weights:
            self.are_same = self.are_same and self._is_same(name, weight)
            yield name, weight

    def _is_same(self, name: str, weight: torch.Tensor) -> bool:
        sample = self._compared.sample(name)
        if sample is None:
            return False
        try:
            see_tensor(self._compared, sample, weight)
        except KvweaveError:
            return False
        return sample.name not in self._compared.skipped


def _samples(file: Path) -> Iterator[WeightSample]:
    stored = StoredTensors.of(file)
    for name, tensor in stored.by_name.items():
        if tensor.dtype in FLOATS and 0 not in tensor.shape:
            values = stored.floats(tensor, places(tensor.shape, VALUES))
            dtype, shape = FLOATS[tensor.dtype][0], tuple(tensor.shape)
            yield WeightSample(plain_name(name), dtype, shape, tuple(values))
