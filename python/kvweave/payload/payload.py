"""A request's KV as one object: a header and the parts it names, in memory, as bytes, as a file.

The bytes are a safetensors file: any tool that reads those can look inside. Its metadata holds the
header and the checksums of the parts as JSON, after a checksum of that text. Checksums (CRC-32)
find what a network or a disk has spoiled; they are no signature, so everything is checked field by
field as well.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save, save_file

from kvweave.errors import CorruptPayload, InvalidArgument
from kvweave.payload.header import PayloadHeader
from kvweave.payload.header_fields import parsed
from kvweave.payload.packed import check_packed

TOKENS, LOGITS = "tokens", "logits"
TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
PART_DTYPES = {**TORCH_DTYPES, "u8": torch.uint8, "i32": torch.int32}

_BYTES: tuple[type, ...] = (bytes, bytearray, memoryview)
_METADATA, _CHECKSUMS = "kvweave.payload", "crc32"
_NAMES = {dtype: name.upper() for name, dtype in PART_DTYPES.items()}


@dataclass(frozen=True)
class PayloadSizes:
    """Bytes of K and V of each part, all together, and of every token in every head."""

    parts: dict[str, int]
    total: int
    dense: int

    @property
    def saving(self) -> float:
        """How many times smaller than dense the payload is."""
        return self.dense / self.total if self.total else float("inf")


@dataclass(frozen=True, eq=False)
class KvPayload:
    """The KV of one request, as much of each head as the tokens that follow can see.

    `parts`: `tokens` i32 [T]; `group.<i>` [heads, 2, n, D], keys and values of the n positions in
    the header's spans of group i; `promoted.<layer>.<head>` [1, 2, T, D]; `packed.…` as
    `PackedTokens` has them, of a request with packed pages; and `logits` f32 [V] of the last token
    where they were exported. Tensors of any device.

    # Errors
    `CorruptPayload` for parts that are not what the header says, or packed tokens that lie nowhere.
    """

    header: PayloadHeader
    parts: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        found = {
            name: (_NAMES.get(part.dtype, str(part.dtype)), tuple(part.shape))
            for name, part in self.parts.items()
        }
        _expect_parts(self.header, found)
        header = self.header
        if header.packed is not None:
            sink = header.groups[0].sink
            known = self.parts, header.head_dim, header.page_tokens, sink
            check_packed(header.packed, *known)

    @property
    def tokens(self) -> torch.Tensor:
        """The request's tokens i32 [T]."""
        return self.parts[TOKENS]

    @property
    def logits(self) -> torch.Tensor | None:
        """Logits f32 [V] of the last token, which the next one is chosen by."""
        return self.parts.get(LOGITS)

    def sizes(self) -> PayloadSizes:
        """Bytes of K and V, by part and beside a dense payload; of what they lie packed in too."""
        held = {name: self.parts[name] for name in self.header.part_kinds()}
        parts = {name: part.numel() * part.element_size() for name, part in held.items()}
        return PayloadSizes(parts, sum(parts.values()), self.header.dense_bytes)

    def on_host(self) -> KvPayload:
        """The same with parts that lie on the host; those that do are the very same."""
        return KvPayload(self.header, self._on_host())

    def to_bytes(self) -> bytes:
        """The payload as a safetensors file; its parts come to the host if they are not there."""
        parts = self._on_host()
        return save(parts, _metadata(self.header, parts))

    def save(self, path: str | PathLike[str]) -> None:
        """Writes what `to_bytes` gives."""
        parts = self._on_host()
        save_file(parts, path, _metadata(self.header, parts))

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> KvPayload:
        """A payload from bytes of any origin; its parts lie on the host.

        # Errors
        `CorruptPayload` for anything but what `to_bytes` made: other formats and schemas, missing,
        additional or spoiled bytes, and sizes that do not agree.
        """
        if not isinstance(data, _BYTES):
            got = type(data).__name__
            raise InvalidArgument(f"payload: expected bytes, got {got}", expected="bytes", got=got)
        data = bytes(data)
        try:
            stored = dict(deserialize(data))  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise CorruptPayload(f"payload: expected a safetensors file, got {error}") from error
        header, checksums = _described(data)
        found = {name: (str(s["dtype"]), tuple(s["shape"])) for name, s in stored.items()}
        _expect_parts(header, found)
        _expect_checksums({name: s["data"] for name, s in stored.items()}, checksums)
        dtypes = {name: dtype for dtype, name in _NAMES.items()}
        parts = {}
        for name, (dtype, shape) in found.items():
            held = stored[name]["data"]
            flat = torch.frombuffer(held, dtype=dtypes[dtype]) if held else torch.empty(0)
            parts[name] = flat.to(dtypes[dtype]).view(shape)
        return KvPayload(header, parts)

    @staticmethod
    def load(path: str | PathLike[str]) -> KvPayload:
        """A payload from a file. Errors as for `from_bytes`, and `OSError`."""
        return KvPayload.from_bytes(Path(path).read_bytes())

    def _on_host(self) -> dict[str, torch.Tensor]:
        return {name: part.cpu().contiguous() for name, part in self.parts.items()}


def _metadata(header: PayloadHeader, parts: Mapping[str, torch.Tensor]) -> dict[str, str]:
    sums = {n: zlib.crc32(p.reshape(-1).view(torch.uint8).numpy().data) for n, p in parts.items()}
    text = json.dumps({**header.to_json(), _CHECKSUMS: sums}, separators=(",", ":"))
    return {_METADATA: f"{zlib.crc32(text.encode()):08x} {text}"}


def _described(data: bytes) -> tuple[PayloadHeader, Any]:
    """The header and the checksums in the metadata of a safetensors file that was read once."""
    length = int.from_bytes(data[:8], "little")
    # A file may say null here.
    metadata = parsed(data[8 : 8 + length].decode()).get("__metadata__") or {}
    if _METADATA not in metadata:
        raise CorruptPayload(f"payload metadata: expected {_METADATA}, got none")
    seal, _, text = metadata[_METADATA].partition(" ")
    found = f"{zlib.crc32(text.encode()):08x}"
    if seal != found:
        raise CorruptPayload(f"payload header: expected its CRC-32 {found}, got another")
    described = parsed(text)
    checksums = described.pop(_CHECKSUMS, None) if isinstance(described, dict) else None
    return PayloadHeader.from_json(described), checksums


def _expect_parts(header: PayloadHeader, found: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    wanted = {name: (kind.upper(), shape) for name, (kind, shape) in header.part_kinds().items()}
    wanted[TOKENS] = ("I32", (header.tokens,))
    if LOGITS in found:
        wanted[LOGITS] = ("F32", (found[LOGITS][1] + (0,))[:1])
    for name in sorted(wanted.keys() | found.keys()):
        expected = _shown(wanted.get(name))
        got = _shown(found.get(name))
        if expected != got:
            text = f"payload part {name[:60]}: expected {expected}, got {got}"
            raise CorruptPayload(text, expected=expected, got=got)


def _shown(part: tuple[str, tuple[int, ...]] | None) -> str:
    return "none" if part is None else f"{part[0]} {list(part[1])}"


def _expect_checksums(parts: Mapping[str, bytes], checksums: Any) -> None:
    for name, data in parts.items():
        found = zlib.crc32(data)
        if not isinstance(checksums, dict) or checksums.get(name) != found:
            raise CorruptPayload(f"payload part {name}: expected its CRC-32 {found}, got another")
