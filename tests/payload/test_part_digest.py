"""The digest of a part of a payload: its definition in numpy, what changes it, other devices."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.adapters.nixl.part_digest import digest_of, key_for
from versions import needs_cuda

SECRET = b"a secret of sixteen bytes"
BLOCK = 4 * 4096
SIZES = [0, 1, 3, 4, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, 70 * BLOCK + 2]


def drawn(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8))


def defined(secret: bytes, name: str, part: torch.Tensor) -> str:
    """Its definition, in integers of 64 bits that wrap around, a block at a time."""
    shaken = hashlib.shake_256(key_for(secret, b"weights")).digest(8 * 2 * 4096)
    weights = np.frombuffer(shaken, "<u8").reshape(2, 4096)
    made = hashlib.blake2b(key=key_for(secret, b"part"), digest_size=32)
    made.update(len(name).to_bytes(8, "little") + part.numel().to_bytes(8, "little"))
    made.update(name.encode())
    data = part.numpy().tobytes()
    data += bytes(-len(data) % BLOCK)
    for start in range(0, len(data), BLOCK):
        words = np.frombuffer(data[start : start + BLOCK], "<i4").astype(np.int64).astype(np.uint64)
        for row in weights:
            total = int((words * row).sum(dtype=np.uint64))
            signed = total - (total >> 63 << 64)
            made.update((signed >> 32).to_bytes(8, "little", signed=True))
    return made.hexdigest()


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_its_definition_says(size: int) -> None:
    assert digest_of(SECRET, "group.0", drawn(size)) == defined(SECRET, "group.0", drawn(size))


def test_parts_may_lie_anywhere_in_memory() -> None:
    whole = drawn(2 * BLOCK + 9)
    for offset in range(1, 9):
        assert digest_of(SECRET, "x", whole[offset:]) == defined(SECRET, "x", whole[offset:])


@given(st.integers(1, 3 * BLOCK), st.data())
@settings(max_examples=60, deadline=None)
def test_every_byte_the_length_the_name_and_the_secret_count(
    size: int, data: st.DataObject
) -> None:
    part = drawn(size)
    digest = digest_of(SECRET, "x", part)
    changed = part.clone()
    changed[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
    others = [
        digest_of(SECRET, "x", changed),
        digest_of(SECRET, "x", part[:-1]),
        digest_of(SECRET, "x", torch.cat([part, part.new_zeros(1)])),
        digest_of(SECRET, "y", part),
        digest_of(SECRET + b"x", "x", part),
    ]
    assert digest not in others
    assert len(set(others)) == len(others)


def test_words_that_change_places_are_seen() -> None:
    part = torch.zeros(2 * BLOCK, dtype=torch.uint8)
    found = set()
    for place in (0, 4, 8, BLOCK - 4, BLOCK, 2 * BLOCK - 4):
        moved = part.clone()
        moved[place] = 1
        found.add(digest_of(SECRET, "x", moved))
    assert len(found) == 6


@needs_cuda
@pytest.mark.parametrize("size", [*SIZES, 5000 * BLOCK + 3])
def test_a_device_makes_the_same(size: int) -> None:
    part = drawn(size + 1)[1:]
    assert digest_of(SECRET, "x", part.cuda()) == digest_of(SECRET, "x", part)
    shifted = drawn(size + 1).cuda()[1:]
    assert digest_of(SECRET, "x", shifted) == digest_of(SECRET, "x", part)
