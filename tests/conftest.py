"""What all tests share: seeds, and no gradients."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from kvweave.models import load_smollm2

# How long an example takes says how busy the machine is.
settings.register_profile("kvweave", deadline=None)
settings.load_profile("kvweave")


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2-135M-Instruct, f32, and its tokenizer."""
    return load_smollm2(torch.float32)


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
