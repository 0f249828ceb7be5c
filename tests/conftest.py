"""What all tests share: seeds, and no gradients."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def numbers() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
