"""Out of one cache and into another: what the tokens to come can see of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave.cache import HeadGroup, KvCache, KvRequest
from kvweave.errors import InvalidArgument, NamespaceConflict, Unsupported
from kvweave.ops import RopeTable
from kvweave.payload.header import (
    GroupSpans,
    PayloadHeader,
    Span,
    group_part,
    positions_of,
    promoted_part,
)
from kvweave.payload.packed import PackedTokens
from kvweave.payload.pages import Places, gather, scatter, turn
from kvweave.payload.payload import LOGITS, TOKENS, TORCH_DTYPES, KvPayload


def export_kv(
    cache: KvCache,
    pages: torch.Tensor,
    request: KvRequest,
    *,
    rope: RopeTable | None = None,
    logits: torch.Tensor | None = None,
    whole: bool = False,
    packed: PackedTokens | None = None,
) -> KvPayload:
    """The KV of a request whose rows are all computed; the request stays as it is.

    `pages` is the whole arena [pages, 2, P, D] where it lies, and so are the payload's parts. Full
    heads and promoted ones give every token, window heads what they still hold of the blocks that
    the next token sees, or, with `whole`, everything that they hold. Keys leave at their final
    rotation: those that a request reads where another rotated them ("share") are rotated on the
    way, which takes `rope`. `logits` f32 [V] of the last token go along where they are given, and
    so do `packed` tokens, of a request whose exact pages are windows alone.

    # Errors
    `InvalidArgument` for pages that are not the cache's, keys to rotate without `rope`, or a
    released request; `Unsupported` for an fp8 cache.
    """
    _expect_pages(cache, pages)
    length = request.length
    tables = [Places.read_by(request, table) for table in range(request.tables)]
    count = len(cache.groups)
    layers = [cache.page_layers(group) for group in range(count)]
    layers += [np.asarray([layer], np.int32) for layer, _ in request.promoted]
    shape, groups = cache.shape, []
    for index, group in enumerate(cache.groups):
        if not whole:
            needed = _needed(group, tables[index], length, shape.page_tokens)
            tables[index] = tables[index].of(needed)
        spans = _spans(tables[index].positions)
        groups.append(GroupSpans(group.kind, group.sink, group.recent, spans))
    header = PayloadHeader(
        fingerprint=cache.fingerprint,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        page_tokens=shape.page_tokens,
        dtype=shape.dtype,
        tokens=length,
        namespace=request.namespace,
        regime=request.regime,
        groups=tuple(groups),
        head_groups=_head_groups(cache),
        promoted=tuple(sorted(request.promoted)),
        packed=None if packed is None else packed.header,
    )
    names = [group_part(index) for index in range(count)]
    names += [promoted_part(*place) for place in request.promoted]
    parts = {TOKENS: torch.from_numpy(np.asarray(request.tokens, np.int32))}
    for name, places, of_page in zip(names, tables, layers, strict=True):
        parts[name] = gather(pages, places, len(of_page))
        if places.deltas.any():
            if rope is None:
                raise InvalidArgument("rope: expected the table of a request in share, got none")
            turn(parts[name], places.deltas, of_page, rope, shape)
    if packed is not None:
        parts |= packed.parts
    if logits is not None:
        parts[LOGITS] = logits.detach().reshape(-1).float().clone()
    return KvPayload(header, parts)


def import_kv(
    cache: KvCache,
    pages: torch.Tensor,
    payload: KvPayload,
    *,
    namespace: str | None = None,
    reserve_tokens: int = 0,
) -> KvRequest:
    """Admits a payload's request and writes its KV into the pages: it decodes on from here.

    The cache has the weights, geometry, dtype and head classes of the one it comes from; its pages
    may be of another size. `namespace` is whose request is expected (None: the payload's word is
    taken). The request is there to be decoded from: windows were cut to what the next tokens see,
    so it refuses to be committed for other prompts, and its window heads to be promoted.

    # Errors
    `InvalidArgument` for a payload of another model or map, or with packed tokens,
    `NamespaceConflict` for one of another namespace, `PoolFull` when it does not fit, `Unsupported`
    for an fp8 cache. After any error nothing is held.
    """
    _expect_all_exact(payload.header)
    return import_exact(cache, pages, payload, namespace, reserve_tokens)


def import_exact(
    cache: KvCache,
    pages: torch.Tensor,
    payload: KvPayload,
    namespace: str | None = None,
    reserve_tokens: int = 0,
) -> KvRequest:
    """As `import_kv`; of a payload with packed tokens all that lies in exact pages of a request.

    # Errors
    As `import_kv`.
    """
    _expect_pages(cache, pages)
    _expect_alike(cache, payload.header, namespace)
    header = payload.header
    request = cache.admit(
        payload.tokens.cpu().numpy(),
        namespace=header.namespace,
        reuse="none",
        reserve_tokens=reserve_tokens,
        regime=header.regime,
        chunk_tokens=cache.shape.page_tokens,
    )
    try:
        for place in header.promoted:
            request.promote(*place)
        request.advance(header.tokens, header.tokens)
        for index, group in enumerate(header.groups):
            _write(pages, request, index, group.spans, payload.parts[group_part(index)])
        for index, place in enumerate(request.promoted, len(header.groups)):
            whole = ((0, header.tokens),)
            _write(pages, request, index, whole, payload.parts[promoted_part(*place)])
        request.bring_in()
    except BaseException:
        request.release()
        raise
    return request


def freeze_kv(
    cache: KvCache, pages: torch.Tensor, payload: KvPayload, name: str, namespace: str
) -> None:
    """Freezes a payload's text under a name, as if it had been prefilled alone in this cache.

    # Errors
    As `admit_kv`, and `QuotaExceeded`. After any error nothing is held.
    """
    with admit_kv(cache, pages, payload, namespace) as request:
        request.freeze(name, 0, request.length)


def admit_kv(cache: KvCache, pages: torch.Tensor, payload: KvPayload, namespace: str) -> KvRequest:
    """A request of a payload's text, committed as if it had been prefilled alone in this cache.

    # Errors
    `InvalidArgument` for a payload of another model or map, of a request that promoted heads, or
    one that was cut to what a next token sees; `NamespaceConflict`, `Unsupported` as `import_kv`;
    `PoolFull` when it does not fit. After any error nothing is held.
    """
    coming = ComingKv(cache, pages, payload, namespace)
    try:
        coming.write_to(payload.header.layers)
        coming.commit()
    except BaseException:
        coming.release()
        raise
    return coming.request


class ComingKv:
    """A request of a payload's text, as `admit_kv`, whose KV is written layer by layer.

    `layers` of them so far; it is committed as soon as whoever has it says so.

    # Errors
    As `admit_kv`.
    """

    def __init__(
        self, cache: KvCache, pages: torch.Tensor, payload: KvPayload, namespace: str
    ) -> None:
        _expect_pages(cache, pages)
        header = payload.header
        _expect_all_exact(header)
        _expect_alike(cache, header, namespace)
        all_of_it = ((0, header.tokens),)
        if header.promoted or any(group.spans != all_of_it for group in header.groups):
            raise InvalidArgument("payload: expected every token in every head, got a part of them")
        tokens, regime = payload.tokens.cpu().numpy(), header.regime
        self.layers = 0
        self.request = cache.admit(tokens, namespace=namespace, reuse="none", regime=regime)
        self._pages, self._payload = pages, payload
        groups = range(len(header.groups))
        self._places = [Places.read_by(self.request, group) for group in groups]
        self._layers = [cache.page_layers(group) for group in groups]

    def write_to(self, layers: int) -> None:
        """Writes on until the KV of so many layers is in the pages."""
        for group, (places, of_page) in enumerate(zip(self._places, self._layers, strict=True)):
            begin, end = np.searchsorted(of_page, (self.layers, layers)).tolist()
            if begin < end:
                here = replace(places, blocks=places.blocks + np.int32(begin))
                scatter(self._pages, here, self._payload.parts[group_part(group)][begin:end])
        self.layers = layers

    def commit(self) -> None:
        """Has it found by others from now on, whether all of it has been written or not."""
        self.request.commit(self.request.length, self.request.length)

    def release(self) -> None:
        """Lets the blocks go; what was not written as a whole is found by nobody any more."""
        if self.layers < self._payload.header.layers and not self.request.released:
            self.request.retract()
        self.request.release()


def _write(
    pages: torch.Tensor,
    request: KvRequest,
    table: int,
    spans: tuple[Span, ...],
    part: torch.Tensor,
) -> None:
    """Writes what a part holds of the blocks that a table keeps.

    What it lacks of them no coming token sees; zeros go there, so that nothing of others stays.
    Run by run: of a part in the host's memory `index_select` takes minutes for 1 GB where many
    threads share it.
    """
    kept = Places.read_by(request, table)
    given = positions_of(spans)
    held = np.isin(kept.positions, given, assume_unique=True)
    places, written = kept.of(held), 0
    for begin, end in _spans(np.searchsorted(given, places.positions)):
        run = places.of(slice(written, written + end - begin))
        scatter(pages, run, part[:, :, begin:end])
        written += end - begin
    if not held.all():
        heads, kv, _, dim = part.shape
        zeros = part.new_zeros(heads, kv, int((~held).sum()), dim)
        scatter(pages, kept.of(~held), zeros)


def _needed(group: HeadGroup, places: Places, length: int, width: int) -> npt.NDArray[np.bool_]:
    """Which places lie in blocks that the token after `length` others sees some of."""
    chosen = np.zeros(len(places.positions), np.bool_)
    for begin, end in GroupSpans(group.kind, group.sink, group.recent, ()).visible(length):
        first, behind = begin // width * width, -(-end // width) * width
        chosen |= (first <= places.positions) & (places.positions < behind)
    return chosen


def _spans(positions: npt.NDArray[np.integer[Any]]) -> tuple[Span, ...]:
    """The runs of sorted positions."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    runs = np.split(positions, breaks)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs if len(run))


def _head_groups(cache: KvCache) -> tuple[int, ...]:
    tables = [cache.head_rows(layer)[:, 0] for layer in range(cache.shape.layers)]
    return tuple(np.concatenate(tables).tolist())


def _expect_pages(cache: KvCache, pages: torch.Tensor) -> None:
    if cache.shape.dtype not in TORCH_DTYPES:
        # Numbers of an fp8 cache mean something beside their scales alone, which no cache knows.
        kinds = ", ".join(TORCH_DTYPES)
        raise Unsupported(f"payload dtype: expected one of {kinds}, got {cache.shape.dtype}")
    expected = (tuple(cache.arena.shape), TORCH_DTYPES[cache.shape.dtype])
    got = (tuple(pages.shape), pages.dtype)
    if got != expected or not pages.is_contiguous():
        raise InvalidArgument(f"pages: expected the cache's own {expected}, got a tensor {got}")


def _expect_all_exact(header: PayloadHeader) -> None:
    if header.packed is not None:
        got = header.packed.format.name
        raise InvalidArgument(f"payload format: expected exact pages alone, got {got} beside them")


def _expect_alike(cache: KvCache, header: PayloadHeader, namespace: str | None) -> None:
    shape = cache.shape
    classes = tuple((group.kind, group.sink, group.recent) for group in cache.groups)
    for what, expected, got in (
        ("fingerprint", cache.fingerprint, header.fingerprint),
        ("layers", shape.layers, header.layers),
        ("kv_heads", shape.kv_heads, header.kv_heads),
        ("head_dim", shape.head_dim, header.head_dim),
        ("dtype", shape.dtype, header.dtype),
        ("head classes", classes, tuple((g.kind, g.sink, g.recent) for g in header.groups)),
        ("head map", _head_groups(cache), header.head_groups),
    ):
        if expected != got:
            raise InvalidArgument(f"payload {what}: expected {expected}, got {got}")
    if namespace is not None and namespace != header.namespace:
        raise NamespaceConflict(
            f"payload namespace: expected {namespace!r}, got {header.namespace!r}"
        )
