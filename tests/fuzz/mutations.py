"""Documents that were spoiled: bytes at random, and numbers, words and brackets."""

from __future__ import annotations

import re
from random import Random

NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
TOKENS = (
    b"-1",
    b"0",
    b"1e309",
    b"NaN",
    b"1.5",
    b"true",
    b"null",
    b'""',
    b"{}",
    b"[]",
    b"[[[[",
    b'"\\ud800"',
    b'"\\u0000"',
    b"\xff",
    b"\x00",
    b",",
    b":",
    b"\\",
    str(2**31).encode(),
    str(2**32 - 1).encode(),
    str(2**63).encode(),
    str(2**64).encode(),
    b"9" * 400,
    b"\xff" * 8,
    (2**31).to_bytes(8, "little"),
    (2**63 - 1).to_bytes(8, "little"),
)
MOST = 4


def spoiled(random: Random, documents: list[bytes]) -> bytes:
    """One of some documents, changed in up to four places."""
    data = random.choice(documents)
    for _ in range(random.randint(1, MOST)):
        data = random.choice(CHANGES)(random, data, documents)
    return data


def _span(random: Random, data: bytes, most: int = 64) -> tuple[int, int]:
    start = random.randint(0, len(data))
    return start, min(len(data), start + random.randint(0, most))


def _flip(random: Random, data: bytes, _: list[bytes]) -> bytes:
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _overwrite(random: Random, data: bytes, _: list[bytes]) -> bytes:
    start, end = _span(random, data, 16)
    return data[:start] + random.randbytes(end - start) + data[end:]


def _insert(random: Random, data: bytes, _: list[bytes]) -> bytes:
    at = random.randint(0, len(data))
    return data[:at] + random.choice(TOKENS) + data[at:]


def _replace(random: Random, data: bytes, _: list[bytes]) -> bytes:
    start, _end = _span(random, data)
    token = random.choice(TOKENS)
    return data[:start] + token + data[start + len(token) :]


def _number(random: Random, data: bytes, _: list[bytes]) -> bytes:
    found = list(NUMBER.finditer(data[:65536]))
    if not found:
        return data
    one = random.choice(found)
    return data[: one.start()] + random.choice(TOKENS) + data[one.end() :]


def _drop(random: Random, data: bytes, _: list[bytes]) -> bytes:
    start, end = _span(random, data)
    return data[:start] + data[end:]


def _double(random: Random, data: bytes, _: list[bytes]) -> bytes:
    start, end = _span(random, data, 256)
    at = random.randint(0, len(data))
    return data[:at] + data[start:end] + data[at:]


def _cut(random: Random, data: bytes, _: list[bytes]) -> bytes:
    return data[: random.randint(0, len(data))]


def _splice(random: Random, data: bytes, documents: list[bytes]) -> bytes:
    other = random.choice(documents)
    return data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]


CHANGES = (_flip, _overwrite, _insert, _replace, _number, _number, _drop, _double, _cut, _splice)
