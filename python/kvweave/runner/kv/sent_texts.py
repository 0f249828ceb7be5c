"""Texts that are packed by strategies of their own, as they leave a pool for a payload and arrive.

Of a text those blocks travel that are listed, and of these the pages of heads that read all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvweave.cache import KvRequest
from kvweave.errors import InvalidArgument
from kvweave.payload import KvPayload
from kvweave.payload.formats import FormatRanks, TextFormats
from kvweave.payload.packed import PackedHeader, SentText, text_basis, text_pages
from kvweave.payload.page_format import PageFormat
from kvweave.runner.kv.final_text import FormatData
from kvweave.runner.kv.final_texts import FinalEntries
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.tables import Int32, send_index
from kvweave.runner.kv.text_memory import sizes_of


@dataclass(frozen=True, eq=False)
class SentTexts:
    """What a payload has of texts: in its header, as parts, and entries i32 [N, 5] of all.

    These name blocks by numbers behind those of the pool's format. `blocks`: the same blocks, text
    by text, by their numbers in the books.
    """

    listed: tuple[SentText, ...]
    parts: dict[str, torch.Tensor]
    entries: Int32
    blocks: Int32


def sent_texts(texts: Sequence[FinalEntries], first: int, sent: npt.NDArray[np.int64]) -> SentTexts:
    """Those that a request reads, whose blocks count from `first` on; `sent`: ranks that travel."""
    listed, parts, entries = [], {}, [np.zeros((0, 5), np.int32)]
    named = [np.zeros(0, np.int32)]
    for number, (text, some) in enumerate(texts):
        blocks, which = np.unique(some[:, 0], return_inverse=True)
        own = some.copy()
        own[:, 0] = first + which
        entries.append(own)
        named.append(text.blocks[blocks])
        first += len(blocks)
        formats: list[FormatRanks] = []
        for part in text.parts:
            among = np.flatnonzero(np.isin(part.ranks, sent))
            if not len(among):
                continue
            data, basis = part.data, part.basis
            index = (part.blocks(blocks.astype(np.int32))[:, None] + among).reshape(-1)
            pages = data.index_select(0, send_index(data.device, index).long())
            parts[text_pages(number, len(formats))] = pages.view(len(blocks), len(among), -1)
            if basis is not None:
                kept = basis.index_select(0, send_index(data.device, among).long())
                parts[text_basis(number, len(formats))] = kept
            ranks = tuple(part.ranks[among].tolist())
            formats.append(FormatRanks(PageFormat.of(part.format), ranks))
        known = TextFormats(tuple(formats), text.most_lost, text.over_bound)
        listed.append(SentText(len(blocks), known))
    return SentTexts(tuple(listed), parts, np.concatenate(entries), np.concatenate(named))


def expect_formats(pool: PackedPool, texts: Sequence[SentText]) -> None:
    """Refuses texts in formats that are none of a pool's strategy.

    # Errors
    `InvalidArgument` naming one.
    """
    known = [PageFormat.of(of) for of in pool.final_formats]
    expected = ", ".join(of.name for of in known)
    for each in (each for text in texts for each in text.formats.formats):
        if each.format not in known:
            raise InvalidArgument(
                f"payload format of a text: expected one of [{expected}], which the strategy here "
                f"has, got {each.format.name}"
            )


def taken_texts(
    pool: PackedPool, payload: KvPayload, packed: PackedHeader, into: list[KvRequest]
) -> int:
    """Puts the texts of a payload beside a pool, each with a request `into` a list; their bytes.

    Nobody finds them; they go when nobody has the request.

    # Errors
    `PoolFull` without room for one, `OutOfMemory`; those before it are in the list.
    """
    total = 0
    for number, text in enumerate(packed.texts):
        documents = pool.documents
        assert documents is not None
        formats = [(each.format.for_dim(pool.head_dim), each) for each in text.formats.formats]
        sizes = [
            size for of, each in formats for size in sizes_of(of, len(each.ranks), text.blocks)
        ]
        documents.expect_room(text.blocks, sizes)
        made = _data_of(pool, payload, number, text)
        losses = text.formats.most_lost, text.formats.over_bound
        into.append(documents.bring_alone(text.blocks, made, losses))
        total += sum(nbytes for nbytes, _ in sizes)
    return total


def _data_of(pool: PackedPool, payload: KvPayload, number: int, text: SentText) -> list[FormatData]:
    """The pages of a text, format by format, as a payload has them."""
    made = []
    for at, each in enumerate(text.formats.formats):
        of = each.format.for_dim(pool.head_dim)
        basis = None if of.basis_rows is None else payload.parts[text_basis(number, at)]
        data = payload.parts[text_pages(number, at)]
        made.append(FormatData(of, np.asarray(each.ranks, np.int64), data, basis))
    return made
