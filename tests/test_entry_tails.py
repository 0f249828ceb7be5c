"""Entry tables that grow in place say what the cache says, after any number of steps."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from head_maps import class_map
from kvweave.cache import KvCache, KvRequest, KvShape
from kvweave.runner import Sampling
from kvweave.runner.decode_step import newest
from kvweave.runner.decoding import Decoding, by_regime
from kvweave.runner.entry_tails import NO_ENTRY, SPARE, EntryTails
from kvweave.runner.rope import PositionTable

PAGE = 8
CPU = torch.device("cpu")


def decoding(request: KvRequest, limit: int) -> Decoding:
    table = PositionTable({}, {}, None, 7)
    return Decoding(request, table, Sampling(), limit, CPU)


def admitted(cache: KvCache, length: int, seed: int, donor: np.ndarray | None) -> KvRequest:
    """A prompt, or one that reads part of a donor's blocks in place."""
    tokens = np.random.default_rng(seed).integers(0, 99, length).astype(np.int32)
    if donor is None:
        return cache.admit(tokens, reuse="none")
    whole = np.concatenate((tokens, donor, tokens[:3]))
    marks = [(length, length + len(donor), "kb")]
    return cache.admit(whole, segments=marks, mode="share")


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    shared=st.booleans(),
    steps=st.integers(0, 3 * PAGE * 4),
    limit=st.integers(1, 400),
)
def test_a_table_that_grows_is_the_caches_own(lengths, shared, steps, limit) -> None:
    cache = KvCache(KvShape(2, 2, 8, PAGE), blocks=400)
    donor = np.arange(100, 100 + 5 * PAGE, dtype=np.int32) if shared else None
    if donor is not None:
        with cache.admit(donor, namespace="kb") as request:
            request.commit(len(donor), len(donor))
    requests = [admitted(cache, length, i, donor) for i, length in enumerate(lengths)]
    batch = [decoding(request, limit) for request in requests]
    tails = EntryTails(batch, PAGE)
    table = tails.table(int(tails.offsets[-1]) + 3)
    for _ in range(steps):
        for request in requests:
            request.append(np.asarray([5], np.int32))
        assert tails.of(batch)
        places = newest(batch)
        slots = [r.slots(places[i : i + 1]) for i, r in enumerate(requests)]
        if not tails.grow(places, np.concatenate(slots)[None]):
            tails = EntryTails(batch, PAGE)
            table = tails.table(int(tails.offsets[-1]) + 3)
        patch = tails.patch()[:, 0, 0]
        table[patch[:, 0]] = patch[:, 1:]
        for index, request in enumerate(requests):
            start, end = tails.offsets[index : index + 2]
            entries = request.entries()
            assert np.array_equal(table[start : start + len(entries)], entries)
            assert all(tuple(row) == NO_ENTRY for row in table[start + len(entries) : end])
            assert end - start - len(entries) <= SPARE
    assert all(tuple(row) == NO_ENTRY for row in table[tails.offsets[-1] :])


def listed(table: np.ndarray) -> dict[int, tuple[int, int, int]]:
    """Where the KV of each position lies by a table: block, slot, delta."""
    return {
        position + i: (block, begin + i, delta)
        for block, begin, end, position, delta in table.tolist()
        for i in range(end - begin)
    }


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    windows=st.lists(
        st.tuples(st.sampled_from([PAGE, 9, 20]), st.sampled_from([0, 3, 8, 17])), max_size=2
    ),
    shared=st.booleans(),
    steps=st.integers(0, 4 * PAGE),
    limit=st.integers(1, 400),
)
def test_tables_whose_windows_move_on_list_what_is_seen(
    lengths, windows, shared, steps, limit
) -> None:
    """As the cache's own tables do, and no block that the cache has let go of."""
    classes = np.asarray([(0, 0), *windows, (0, 0)][:4], np.int32)
    classes = np.resize(classes, (2, 2, 2))
    shape = KvShape(2, 2, 8, PAGE)
    cache = KvCache(shape, blocks=400, heads=class_map(classes, "m"), fingerprint="m")
    kept = [(g.recent, g.sink) if g.kind == "window" else None for g in cache.groups]
    donor = np.arange(100, 100 + 5 * PAGE, dtype=np.int32) if shared else None
    if donor is not None:
        with cache.admit(donor, namespace="kb") as request:
            request.commit(len(donor), len(donor))
            request.freeze("donor", 0, len(donor))
    requests = [admitted(cache, length, i, donor) for i, length in enumerate(lengths)]
    for request in requests:
        for group in range(len(kept)):
            request.take_copies(group)
        request.finish_copies()
        request.advance(request.length, request.length)
        request.append(np.asarray([5], np.int32))
    batch = [decoding(request, limit) for request in requests]
    tails = EntryTails(batch, PAGE, kept)
    table = tails.table(int(tails.offsets[-1]))
    for _ in range(steps):
        for request in requests:
            request.append(np.asarray([5], np.int32))
        places = newest(batch)
        slots = np.stack(
            [
                np.concatenate([r.slots(p[None], t) for r, p in zip(requests, places, strict=True)])
                for t in range(len(kept))
            ]
        )
        if tails.grow(places, slots):
            patch = tails.patch().reshape(-1, 6)
            patch = patch[patch[:, 0] >= 0]
            table[patch[:, 0]] = patch[:, 1:]
        else:
            tails = EntryTails(batch, PAGE, kept)
            table = tails.table(int(tails.offsets[-1]))
        for number, (request, group) in enumerate(
            (r, g) for r in requests for g in range(len(kept))
        ):
            part = table[slice(*tails.offsets[number : number + 2])]
            assert (np.diff(part[:, 3].astype(np.int64)) >= 0).all()
            own, ours = request.entries(group), listed(part)
            whole = listed(own)
            # A donor's block goes when all of it is past; the cache cuts it on the prompt's grid.
            assert all(ours[p] == whole[p] for p in ours.keys() & whole.keys())
            assert {block for block, *_ in ours.values()} <= {b for b, *_ in whole.values()}
            window, sink = kept[group] or (request.length, 0)
            seen = {p for p in range(request.length) if p >= request.length - window or p < sink}
            assert seen <= set(ours)


def test_another_batch_is_another_table() -> None:
    cache = KvCache(KvShape(2, 2, 8, PAGE), blocks=40)
    batch = [decoding(admitted(cache, 5, i, None), 9) for i in range(3)]
    tails = EntryTails(batch, PAGE)
    assert tails.of(batch)
    assert not tails.of(batch[:2])
    assert not tails.of([batch[0], batch[2], batch[1]])
    assert by_regime(batch) == [batch]
