"""`digest_of`: the keyed digest of a part of a payload, made where the part lies.

A multilinear hash makes few words of each block of the part, by integer products on its own device,
and keyed BLAKE2b a digest of these words. So parts on a GPU never come to the host to be checked.
Of two different blocks the words are the same with a probability of 2^-64 for whoever does not know
the secret (Lemire and Kaser, "Strongly universal string hashing is fast", 2014, section 2; two sums
of 32 bits), and BLAKE2b hides the words from who sees digests.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

_WORDS = 4096
"""Words of 4 bytes in a block."""
_SUMS = 2
_AT_ONCE = {"cpu": 64, "cuda": 4096}
"""Blocks whose products are held at once: on a CPU in its caches, on a device in few launches."""
_DIGEST = 32


def digest_of(secret: bytes, name: str, part: torch.Tensor) -> str:
    """The digest, in hexadecimal, of a part u8 [n] of a name, with a secret that both ends know."""
    made = hashlib.blake2b(key=key_for(secret, b"part"), digest_size=_DIGEST)
    for number in (len(name), part.numel()):
        made.update(number.to_bytes(8, "little"))
    made.update(name.encode())
    block, weights = 4 * _WORDS, _weights(key_for(secret, b"weights"), part.device)
    whole = part.numel() // block * block
    # Behind the last whole block stand zeros; how many bytes there are has been said.
    rest = part.new_zeros(block if whole < part.numel() else 0)
    rest[: part.numel() - whole] = part[whole:]
    some = (*part[:whole].split(_AT_ONCE[part.device.type] * block), rest)
    sums = [_sums(blocks, weights) for blocks in some if blocks.numel()]
    if sums:
        made.update(torch.cat(sums).cpu().numpy().tobytes())
    return made.hexdigest()


def key_for(secret: bytes, use: bytes) -> bytes:
    """A key of its own for each use of the secret."""
    return hashlib.blake2b(use, key=secret, digest_size=_DIGEST).digest()


def _sums(blocks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The words i64 [blocks, sums] of whole blocks u8: of each sum modulo 2^64 its upper half."""
    if blocks.data_ptr() % 4:
        blocks = blocks.clone()
    words = blocks.view(torch.int32).view(-1, _WORDS).long()
    return torch.stack([(words * row).sum(1) >> 32 for row in weights], 1)


@lru_cache(maxsize=8)
def _weights(key: bytes, device: torch.device) -> torch.Tensor:
    """Weights i64 [sums, words] that who does not know the key cannot tell from drawn ones."""
    drawn = bytearray(hashlib.shake_256(key).digest(8 * _SUMS * _WORDS))
    return torch.frombuffer(drawn, dtype=torch.int64).view(_SUMS, _WORDS).to(device)
