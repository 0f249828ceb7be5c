"""`digest_of`: the keyed digest of a part of a payload, made where the part lies.

A multilinear hash makes few words of each block of the part, by integer products on its own device,
and keyed BLAKE2b a digest of these words. So parts on a GPU never come to the host to be checked.
Of two different blocks the words are the same with a probability of 2^-64 for whoever does not know
the secret (Lemire and Kaser, "Strongly universal string hashing is fast", 2014, section 2; two sums
of 32 bits), and BLAKE2b hides the words from who sees digests.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

Sums = npt.NDArray[np.int64]

_WORDS = 4096
"""Words of 4 bytes in a block."""
_BLOCK = 4 * _WORDS
_SUMS = 2
_ON_DEVICE, _ON_HOST = 4096, 64
"""Blocks whose products are held at once: few launches on a device, what caches hold on a host."""
_THREADS = 8
"""Of the host, at most. Not torch's own: these wait for each other at every product."""
_DIGEST = 32


def digest_of(secret: bytes, name: str, part: torch.Tensor) -> str:
    """The digest, in hexadecimal, of a part u8 [n] of a name, with a secret that both ends know."""
    made = hashlib.blake2b(key=key_for(secret, b"part"), digest_size=_DIGEST)
    for number in (len(name), part.numel()):
        made.update(number.to_bytes(8, "little"))
    made.update(name.encode())
    whole = part.numel() // _BLOCK * _BLOCK
    # Behind the last whole block stand zeros; how many bytes there are has been said.
    rest = part.new_zeros(_BLOCK if whole < part.numel() else 0)
    rest[: part.numel() - whole] = part[whole:]
    key = key_for(secret, b"weights")
    for blocks in (part[:whole], rest):
        if blocks.numel():
            made.update((_on_device if part.is_cuda else _on_host)(blocks, key).tobytes())
    return made.hexdigest()


def key_for(secret: bytes, use: bytes) -> bytes:
    """A key of its own for each use of the secret."""
    return hashlib.blake2b(use, key=secret, digest_size=_DIGEST).digest()


def _on_device(blocks: torch.Tensor, key: bytes) -> Sums:
    """The words [blocks, sums] of whole blocks u8: of each sum modulo 2^64 its upper half."""
    if blocks.data_ptr() % 4:
        blocks = blocks.clone()
    weights = torch.from_numpy(_weights(key)).to(blocks.device)
    words = blocks.view(torch.int32).view(-1, _WORDS)
    starts = range(0, len(words), _ON_DEVICE)
    some = (words[start : start + _ON_DEVICE].long() for start in starts)
    sums = [torch.stack([(rows * row).sum(1) >> 32 for row in weights], 1) for rows in some]
    found: Sums = torch.cat(sums).cpu().numpy()
    return found


def _on_host(blocks: torch.Tensor, key: bytes) -> Sums:
    """The same, by a few threads."""
    weights, rows = _weights(key), blocks.numpy().view("<i4").reshape(-1, _WORDS)

    def of(start: int) -> Sums:
        words = rows[start : start + _ON_HOST].astype(np.int64)
        return np.stack([(words * row).sum(1) >> 32 for row in weights], 1)

    starts = range(0, len(rows), _ON_HOST)
    with ThreadPoolExecutor(min(_THREADS, len(starts), os.cpu_count() or 1)) as threads:
        return np.concatenate(list(threads.map(of, starts)))


@lru_cache(maxsize=8)
def _weights(key: bytes) -> Sums:
    """Weights [sums, words] that who does not know the key cannot tell from drawn ones."""
    drawn = hashlib.shake_256(key).digest(8 * _SUMS * _WORDS)
    return np.frombuffer(bytearray(drawn), np.int64).reshape(_SUMS, _WORDS)
