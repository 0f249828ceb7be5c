"""`FinalForm`: documents of a pool that packs them by a strategy, which leave as they are packed.

One that is packed finally has parts for each of its formats, and a list of which pages of a block
have which; one that is not is in the pool's format. Whose strategy that is says its provenance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np
import torch

from kvweave.cache import KvRequest
from kvweave.device_memory import needs_memory
from kvweave.errors import CorruptPayload, CorruptShard
from kvweave.ops import PackedFormat, RopeTable
from kvweave.payload.formats import FormatRanks, TextFormats, check_basis, expect_known
from kvweave.payload.header_fields import parsed
from kvweave.payload.page_format import PageFormat
from kvweave.payload.stored import part_of
from kvweave.remote import RemoteShard
from kvweave.runner.kv.final_documents import FinalDocuments
from kvweave.runner.kv.final_text import FinalText, FormatData
from kvweave.runner.kv.final_texts import FinalTexts
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.pool_bases import BlockBases, basis_bytes, basis_shape
from kvweave.runner.kv.tables import Int32
from kvweave.runner.kv.text_memory import sizes_of
from kvweave.runner.tiers.document_form import RowsFlops
from kvweave.runner.tiers.packed_form import FIRSTS, PackedDocument, PackedForm
from kvweave.store import Provenance, Shard

VERSION = 1
"""Of how parts of such documents are laid out."""

FORMATS = "formats"

_MOST_TEXT = 1 << 22
"""Bytes of the list of formats, at most."""


class FinalForm(PackedForm):
    """As `PackedForm`, of a pool with a strategy."""

    pool: PackedPool

    def __init__(self, pool: PackedPool, heads: str, flops: RowsFlops) -> None:
        super().__init__(pool, heads, flops)
        strategy, self.known = pool.packing.strategy, pool.final_formats
        assert strategy is not None
        names = [PageFormat.of(each).name for each in self.known]
        said = json.dumps([float(strategy.bound).hex(), names]).encode()
        self._by = f"by/{VERSION}/{sha256(said).hexdigest()[:32]}"

    @property
    def _documents(self) -> FinalDocuments:
        documents = self.pool.documents
        assert documents is not None
        return documents

    @property
    def _final(self) -> FinalTexts:
        final = self.pool.final
        assert final is not None
        return final

    @property
    def token_bytes(self) -> int:
        """The most that a token has, whatever format its heads are in."""
        most = max(of.page_bytes for of in (*self.known, self.pool.pages.format))
        return self.pool.block_pages * most // self._page_tokens

    @property
    def least_block_bytes(self) -> int:
        """The fewest that a block has."""
        least = min(of.page_bytes for of in (*self.known, self.pool.pages.format))
        return self.pool.block_pages * least

    def provenance(self, namespace: str, regime: int) -> Provenance:
        """That of the pool's format and of the strategy, bound and candidates and all."""
        return self._provenance(namespace, regime, self._by)

    def hold(self, request: KvRequest) -> None:
        """Says that a request's blocks are read until it is released."""
        self._documents.hold(request)

    def export(self, request: KvRequest, rope: RopeTable | None = None) -> PackedDocument:
        """The document of a request as it is packed now."""
        tokens = np.asarray(request.tokens, np.int32)
        text = self._final.text_of(tokens, request.namespace, request.regime)
        if text is None:
            known = super().export(request, rope)
            return PackedDocument(known.header, tokens, {FORMATS: _PLAIN, **known.parts})
        header = self.provenance(request.namespace, request.regime)
        return PackedDocument(header, tokens, parts_of(text) | self._firsts_of(request))

    def admit(self, document: PackedDocument, namespace: str) -> KvRequest:
        """A request of a stored document, which has no page of the pool if it is packed finally.

        # Errors
        As `DocumentForm.admit`; `OutOfMemory` where the device has no memory for its pages.
        """
        self._expect(document, namespace)
        header = self._read_formats(document.parts[FORMATS])
        if not header.formats:
            return super().admit(document, namespace)
        tokens, regime = document.tokens, document.header.regime
        known = self._documents.known(tokens, namespace, regime)
        if known is not None:
            return known
        formats = self._formats(header)
        blocks = -(-len(tokens) // self._page_tokens)
        sizes = [size for of, ranks in formats for size in sizes_of(of, len(ranks), blocks)]
        self._documents.expect_room(blocks, sizes)
        made = data_of(document.parts, formats)
        losses = header.most_lost, header.over_bound
        request = self._documents.bring(tokens, namespace, regime, made, losses)
        try:
            self.pool.bound(request.entries()[:, 0], len(tokens))
            self.put_firsts(request, document.parts.get(FIRSTS))
        except BaseException:
            request.release()
            raise
        return request

    def most_bytes(self, tokens: int) -> int:
        """As `PackedForm.most_bytes`, with the list of formats and their bases."""
        largest = max(basis_bytes(of, self.pool.block_pages) for of in self.known)
        return super().most_bytes(tokens) + _MOST_TEXT + largest

    def read(self, shard: Shard | RemoteShard) -> PackedDocument:
        """The parts of a shard, each as large as the document's tokens and formats ask for.

        # Errors
        As `PackedForm.read`; `CorruptShard` as well for a list of formats that is none, for others
        than the strategy has, and for ranks that are not those of all pages, each once.
        """
        self._expect_header(shard)
        size = shard.parts.get(FORMATS, 0)
        if not 0 < size <= _MOST_TEXT:
            raise CorruptShard(f"shard part formats: expected up to {_MOST_TEXT} bytes, got {size}")
        listed = part_of(shard, FORMATS, (size,), torch.uint8)
        try:
            formats = self._formats(self._read_formats(listed))
        except CorruptPayload as error:
            raise CorruptShard(f"shard {error}") from error
        if not formats:
            known = super().read(shard)
            return PackedDocument(known.header, known.tokens, {FORMATS: listed, **known.parts})
        tokens = shard.tokens().astype(np.int32)
        blocks = -(-len(tokens) // self._page_tokens)
        parts = {FORMATS: listed}
        for at, (of, ranks) in enumerate(formats):
            shape = blocks, len(ranks), of.page_bytes
            parts[_pages(at)] = part_of(shard, _pages(at), shape, torch.uint8)
            if of.basis_rows is not None:
                name, rows = _basis(at), basis_shape(of, len(ranks))
                parts[name] = part_of(shard, name, rows, torch.float32)
                try:
                    check_basis(f"part {name}", of, parts[name])
                except CorruptPayload as error:
                    raise CorruptShard(f"shard {error}") from error
        return PackedDocument(shard.provenance, tokens, parts | self._read_firsts(shard))

    def bases(self, blocks: Int32) -> BlockBases | None:
        """Those of blocks of no final text."""
        return super().bases(self._final.rows(blocks))

    def put_bases(self, blocks: Int32, bases: BlockBases | None) -> None:
        """As `PackedForm.put_bases`, of blocks of no final text."""
        super().put_bases(self._final.rows(blocks), bases)

    def bounds(self, blocks: Int32) -> torch.Tensor | None:
        """Those of all pages of blocks, which are by their numbers in the books."""
        bounds = self.pool.bounds
        return None if bounds is None else bounds.index_select(0, super()._index(blocks)).cpu()

    def put_bounds(self, blocks: Int32, bounds: torch.Tensor | None) -> None:
        """As `bounds`."""
        if self.pool.bounds is not None:
            assert bounds is not None
            index = super()._index(blocks)
            self.pool.bounds.index_copy_(0, index, bounds.to(self.pool.device))

    def _index(self, blocks: Int32) -> torch.Tensor:
        return super()._index(self._final.rows(blocks))

    def _read_formats(self, part: torch.Tensor) -> TextFormats:
        return formats_in(part.cpu(), self.pool.block_pages, self.pool.head_dim, self.known)

    def _formats(self, header: TextFormats) -> list[tuple[PackedFormat, tuple[int, ...]]]:
        dim = self.pool.head_dim
        return [(each.format.for_dim(dim), each.ranks) for each in header.formats]


def data_of(
    parts: Mapping[str, torch.Tensor], formats: Sequence[tuple[PackedFormat, tuple[int, ...]]]
) -> list[FormatData]:
    """The pages of a document, format by format, as its parts have them."""
    return [
        FormatData(
            of,
            np.asarray(ranks, np.int64),
            parts[_pages(at)],
            None if of.basis_rows is None else parts[_basis(at)],
        )
        for at, (of, ranks) in enumerate(formats)
    ]


@needs_memory("packed documents")
def parts_of(text: FinalText) -> dict[str, torch.Tensor]:
    """The parts of a text, copied: its room is that of others when it is gone."""
    listed = tuple(
        FormatRanks(PageFormat.of(part.format), tuple(part.ranks.tolist())) for part in text.parts
    )
    known = TextFormats(listed, text.most_lost, text.over_bound)
    parts = {FORMATS: part_of_formats(known)}
    for at, part in enumerate(text.parts):
        count = len(part.ranks)
        parts[_pages(at)] = part.data[count:].view(len(text.blocks), count, -1).clone()
        if part.basis is not None:
            parts[_basis(at)] = part.basis.clone()
    return parts


def part_of_formats(known: TextFormats) -> torch.Tensor:
    """What is known of a document beside its pages as a part u8 [bytes], in JSON."""
    text = json.dumps(known.to_json(), separators=(",", ":"), allow_nan=False).encode()
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())


def formats_in(
    part: torch.Tensor, pages: int, head_dim: int, known: Sequence[PackedFormat]
) -> TextFormats:
    """What such a part says, which may be of any origin, of blocks of so many pages.

    Of a document in the pool's format it says none. `known`: formats that there may be.

    # Errors
    `CorruptPayload` naming what cannot be.
    """
    try:
        text = part.numpy().tobytes().decode()
    except UnicodeDecodeError as error:
        raise CorruptPayload(f"payload formats: expected UTF-8, got {error.reason}") from error
    found = TextFormats.from_json(parsed(text))
    ranks = range(pages) if found.formats else ()
    expect_known(found.check(ranks, pages, head_dim), known)
    return found


_PLAIN = part_of_formats(TextFormats())
"""Of a document in the pool's format."""


def _pages(number: int) -> str:
    return f"pages.{number}"


def _basis(number: int) -> str:
    return f"basis.{number}"
