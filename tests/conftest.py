"""What all tests share: seeds, and no gradients."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from kvweave.models import load_smollm2

# How long an example takes says how busy the machine is, so nothing is held to a deadline. A change
# is judged by the same examples each time; `make search` looks for others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


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
