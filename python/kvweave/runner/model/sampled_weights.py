"""A few values of a transformers model's weights: for its head maps, and against others' maps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from kvweave.cache import HeadClassMap
from kvweave.weight_sample import (
    WeightComparison,
    WeightSample,
    places,
    plain_name,
    samples_of,
)

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Dtypes of weights that are compared."""
# Norms tell whole families apart, and not models whose norms are ones; projections and embeddings
# do. Adapters that were merged change queries and values first.
_COUNTS = (
    (re.compile(r"(^|\.)embed\w*\.weight$"), 16),
    (re.compile(r"(^|\.)layers\.\d+\.\w+\.([qkv]_proj|qkv_proj|query_key_value)\.weight$"), 4),
    (re.compile(r"norm\w*\.weight$"), 2),
)
"""How many values are taken of the tensors of a name."""


def sampled_weights(model: Any) -> tuple[WeightSample, ...]:
    """Values of a model's embeddings, norms and projections of queries, keys and values.

    Weights in other dtypes than f32, bf16 and f16 are left out: they are packed, and elsewhere
    perhaps in another way.
    """
    return tuple(_samples(model))


def check_weights(heads: HeadClassMap, model: Any) -> None:
    """Refuses a map whose values are not those of a model.

    Errors: `CorruptHeadMap` naming the tensor and the first value that is another.
    """
    compared = WeightComparison(samples_of(heads))
    for name, weight in model.get_decoder().named_parameters():
        sample = compared.sample(name)
        if sample is not None:
            see_tensor(compared, sample, weight)


def of_weights(heads: HeadClassMap | None, model: Any) -> HeadClassMap | None:
    """A map, if there is one, that is of a model's weights; errors as `check_weights`."""
    if heads is not None:
        check_weights(heads, model)
    return heads


def see_tensor(compared: WeightComparison, sample: WeightSample, weight: torch.Tensor) -> None:
    """Compares one tensor, on whatever device it is; errors as `WeightComparison.see`."""
    dtype = DTYPES.get(weight.dtype) if _is_plain(weight) else None
    compared.see(sample, dtype, weight.shape, lambda at: _values(weight, at))


def _samples(model: Any) -> Iterator[WeightSample]:
    for name, weight in model.get_decoder().named_parameters():
        plain, dtype = plain_name(name), DTYPES.get(weight.dtype)
        count = next((count for known, count in _COUNTS if known.search(plain)), 0)
        if count == 0 or dtype is None or not _is_plain(weight):
            continue
        if weight.numel() == 0 or weight.dim() == 0:
            continue
        values = _values(weight, places(weight.shape, min(count, weight.numel())))
        # What is no number is no weight to be told by, and maps have none.
        if all(map(math.isfinite, values)):
            yield WeightSample(plain, dtype, tuple(weight.shape), tuple(values))


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether a tensor is its numbers, and stands for no others."""
    return not hasattr(weight, "__tensor_flatten__")


def _values(weight: torch.Tensor, at: list[int]) -> list[float]:
    """Elements of a tensor in row-major order, however it lies."""
    where = tuple(torch.from_numpy(axis) for axis in np.unravel_index(at, tuple(weight.shape)))
    found: list[float] = weight.detach()[where].float().tolist()
    return found
