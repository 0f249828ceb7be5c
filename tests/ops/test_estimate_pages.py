"""Attention with an estimate of what was left out, against numpy in f64, one term at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import InvalidArgument, ops
from versions import CPU, REFERENCE, RUNNABLE, VERSIONS

LAYERS, HEADS, GROUP, DIM, PAGE = 2, 2, 3, 16, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
FREQUENCIES = np.geomspace(1.0, 0.01, DIM // 2, dtype=np.float32)[None].repeat(LAYERS, 0)
ROPE = ops.RopeTable(FREQUENCIES)


def turned(q: np.ndarray, delta: int) -> np.ndarray:
    """Queries [n, D] turned back by delta, in f64."""
    angle = -delta * FREQUENCIES[0].astype(np.float64)
    one, other = q[:, : DIM // 2], q[:, DIM // 2 :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate((one * cos - other * sin, one * sin + other * cos), -1)


def by_hand(q, attended, table, read, means, rank, softcap, scale):
    """out [n, D] and lse [n] of one request's KV head, from its queries [n, D]."""
    out, lse = attended[0].double().numpy(), attended[1].double().numpy()
    logits, values = [lse], [out]
    for block, begin, end, position, delta in table.tolist():
        key, value = means[block + rank].double().numpy()
        if position in read or not np.isfinite(key).all():
            continue
        logit = turned(q, delta) @ key * scale
        if softcap is not None:
            logit = softcap * np.tanh(logit / softcap)
        logits.append(logit + np.log(end - begin))
        values.append(np.broadcast_to(value, out.shape))
    if len(logits) == 1:
        return out, lse
    stacked = np.stack(logits)
    top = stacked.max(0)
    weights = np.where(np.isneginf(stacked), 0.0, np.exp(stacked - top))
    total = weights.sum(0)
    kept = np.where(weights[:, :, None] > 0, np.stack(values), 0.0)
    return (weights[:, :, None] * kept).sum(0) / total[:, None], top + np.log(total)


class World:
    """Requests with tables of pages, of which each head has read some."""

    def __init__(self, lengths, dtype=torch.float32, seed=0, layer=0, big=1.0) -> None:
        self.draws = np.random.default_rng(seed)
        self.lengths, self.layer, self.dtype = lengths, layer, dtype
        stride, count = LAYERS * HEADS, len(lengths)
        most = max(lengths, default=0)
        rows = []
        for length in lengths:
            blocks = (1 + self.draws.permutation(most))[:length] * stride
            for place, block in enumerate(blocks.tolist()):
                begin = int(self.draws.choice([0, 0, 0, 3]))
                end = int(self.draws.integers(begin + 1, PAGE + 1))
                delta = int(self.draws.choice([0, 0, 5, -3]))
                rows.append((block, begin, end, place * PAGE + begin, delta))
        self.entries = np.array(rows, np.int32).reshape(-1, 5)
        self.offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        # As a cache of this dtype would have them: a CUDA version takes them so.
        means = self.random((most + 1) * stride, 2, DIM) * big
        self.means = means.to(dtype).float()
        self.q = self.random(count, HEADS * GROUP, DIM).to(dtype)
        self.attended = (
            self.random(count, HEADS * GROUP, DIM).to(dtype),
            self.random(count, HEADS * GROUP),
        )
        # Of each request and head: places in its table.
        self.chosen = [
            [np.flatnonzero(self.draws.random(length) < 0.4) for _ in range(HEADS)]
            for length in lengths
        ]

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.from_numpy(self.draws.standard_normal(sizes).astype(np.float32))

    def table(self, request: int) -> np.ndarray:
        return self.entries[self.offsets[request] : self.offsets[request + 1]]

    def read(self) -> ops.ReadEntries:
        """A table for each head of a request, and room behind each that says anything."""
        rows, ends = [], [0]
        for request, of_heads in enumerate(self.chosen):
            for chosen in of_heads:
                rows.append(self.table(request)[chosen])
                rows.append(np.full((2, 5), -7, np.int32))
                ends += [ends[-1] + len(chosen), ends[-1] + len(chosen) + 2]
        entries = np.concatenate([np.zeros((0, 5), np.int32), *rows])
        reach = ops.Reach(2 * HEADS, np.array([(2 * h, 0, 0, 0) for h in range(HEADS)], np.int32))
        return ops.ReadEntries(entries, np.array(ends, np.int32), reach)

    def pages(self, version, softcap=None) -> ops.PageMeans:
        means = self.means.to(self.dtype) if version.device == "cuda" else self.means
        return ops.PageMeans(means, PAGE, self.layer, HEADS, 0.25, ROPE, softcap)

    def call(self, version, softcap=None, **changed):
        named = {"entry_offsets": self.offsets, "read": self.read(), **changed}
        pages = named.pop("pages", self.pages(version, softcap))
        given = named.pop("q", self.q), named.pop("attended", self.attended)
        return version.estimate_pages(*given, self.entries, pages, **named)

    def expect(self, got, softcap=None) -> None:
        out, lse = got
        assert out.dtype is self.dtype
        assert lse.dtype is torch.float32
        close = CLOSE[self.dtype]
        for request in range(len(self.lengths)):
            for head in range(HEADS):
                own = slice(head * GROUP, (head + 1) * GROUP)
                table = self.table(request)
                wanted = by_hand(
                    self.q[request, own].double().numpy(),
                    (self.attended[0][request, own], self.attended[1][request, own]),
                    table,
                    set(table[self.chosen[request][head], 3].tolist()),
                    self.means,
                    self.layer * HEADS + head,
                    softcap,
                    0.25,
                )
                for one, other, slack in zip((out, lse), wanted, (close, 2e-5), strict=True):
                    mine = one[request, own].double().numpy()
                    np.testing.assert_allclose(mine, other, rtol=slack, atol=slack)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    layer=st.integers(0, LAYERS - 1),
    dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 2**16),
    version=st.sampled_from(RUNNABLE),
)
def test_it_is_the_softmax_over_all_terms(lengths, layer, dtype, softcap, seed, version) -> None:
    world = World(lengths, dtype, seed, layer)
    world.expect(world.call(version, softcap), softcap)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_tables_beside_short_ones(version, dtype) -> None:
    """More pages than a thread block knows at a time, and than there are splits."""
    world = World([1, 700, 0, 130, 5000, 128], dtype, 3)
    world.expect(world.call(version))


@pytest.mark.parametrize("version", VERSIONS)
def test_strided_queries_and_scores_that_are_huge(version) -> None:
    """Logits of some ten thousand: of one term, or of what was attended to, all the weight."""
    world = World([9, 40, 300], seed=4, big=1e4)
    world.attended[1][:, ::2] += 2e4
    wide = world.random(3, 2 * HEADS * GROUP, 2 * DIM)
    q = wide[:, ::2, DIM:]
    assert not q.is_contiguous()
    world.q = q
    out, lse = world.call(version)
    again, sums = world.call(REFERENCE)
    torch.testing.assert_close(lse, sums, rtol=1e-6, atol=1e-2)
    # Weights are powers of differences of such numbers, which have three digits less than these.
    torch.testing.assert_close(out / 1e4, again / 1e4, rtol=2e-2, atol=2e-2)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_read_whole_stays_bit_for_bit(version, dtype) -> None:
    world = World([0, 1, 7, 200], dtype, 5)
    world.chosen = [[np.arange(length)] * HEADS for length in world.lengths]
    out, lse = world.call(version)
    assert torch.equal(out, world.attended[0])
    assert torch.equal(lse, world.attended[1])


@pytest.mark.parametrize("version", VERSIONS)
def test_where_nothing_was_read_the_estimate_is_alone(version) -> None:
    """Attention that saw no key counts for nothing, whatever it is."""
    world = World([1, 6, 150], seed=6)
    world.chosen = [[np.zeros(0, np.int64)] * HEADS for _ in world.lengths]
    world.attended = (torch.full_like(world.attended[0], torch.nan), world.attended[1] - torch.inf)
    out, lse = world.call(version)
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())
    world.attended = (torch.zeros_like(out), world.attended[1])
    world.expect((out, lse))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_page_whose_mean_key_is_not_finite_has_no_term(version, bad) -> None:
    """Its mean value is not looked at either; all others have theirs."""
    world = World([6, 200], seed=7)
    for request in range(2):
        block = int(world.table(request)[3, 0])
        world.means[block : block + LAYERS * HEADS, 0, 5] = bad
        world.means[block : block + LAYERS * HEADS, 1] = torch.nan
    world.chosen = [[chosen[chosen != 3] for chosen in heads] for heads in world.chosen]
    world.expect(world.call(version))
    world.means[:, 0, 2] = bad
    out, lse = world.call(version)
    assert torch.equal(out, world.attended[0])
    assert torch.equal(lse, world.attended[1])


@pytest.mark.parametrize("version", VERSIONS)
def test_nan_in_a_query_stays_in_its_row(version) -> None:
    world = World([6, 6], seed=8)
    plain, _ = world.call(version)
    world.q[0, 1, 3] = torch.nan
    world.attended[0][0, 1], world.attended[1][0, 1] = torch.nan, torch.nan
    out, lse = world.call(version)
    assert bool(out[0, 1].isnan().all())
    assert bool(lse[0, 1].isnan())
    out[0, 1] = plain[0, 1]
    assert torch.equal(out, plain)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_row_does_not_depend_on_the_others(version) -> None:
    world = World([300, 5, 40, 0, 1700], seed=9)
    together, sums = world.call(version)
    for request in range(len(world.lengths)):
        alone = World(world.lengths, seed=9)
        alone.lengths = [world.lengths[request]]
        alone.entries = world.table(request)
        alone.offsets = np.array([0, world.lengths[request]], np.int32)
        alone.q = world.q[request : request + 1]
        alone.attended = tuple(x[request : request + 1] for x in world.attended)
        alone.chosen = [world.chosen[request]]
        out, lse = alone.call(version)
        assert torch.equal(out[0], together[request])
        assert torch.equal(lse[0], sums[request])


@pytest.mark.parametrize("version", VERSIONS)
def test_heads_of_a_reach_have_their_own_tables_and_rows(version) -> None:
    """One head estimates nothing: its table is empty. What no head lists may say anything."""
    world = World([5], seed=10)
    garbage = np.full((3, 5), -7, np.int32)
    listed = world.entries
    world.entries = np.concatenate((listed, garbage))
    reach = ops.Reach(3, np.array([[0, 1, 0, 0], [1, 0, 0, 0]], np.int32))
    pages = replace(world.pages(version), reach=reach)
    ends = np.array([0, 5, 5, 0], np.int32)
    out, lse = world.call(version, pages=pages, entry_offsets=ends)
    assert torch.equal(out[:, GROUP:], world.attended[0][:, GROUP:])
    assert torch.equal(lse[:, GROUP:], world.attended[1][:, GROUP:])
    read = set(listed[world.chosen[0][0], 3].tolist())
    first = slice(0, GROUP)
    exact = world.attended[0][0, first], world.attended[1][0, first]
    asked = world.q[0, first].double().numpy()
    wanted, sums = by_hand(asked, exact, listed, read, world.means, 1, None, 0.25)
    np.testing.assert_allclose(out[0, first].double(), wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse[0, first].double(), sums, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_requests_are_no_rows(version) -> None:
    world = World([])
    world.q = torch.zeros(0, HEADS * GROUP, DIM)
    out, lse = world.call(version, attended=(world.q, torch.zeros(0, HEADS * GROUP)))
    assert (out.shape, lse.shape) == (world.q.shape, world.q.shape[:2])


def test_what_does_not_fit_is_refused_and_nothing_written() -> None:
    world = World([4, 3], seed=11)
    good = world.pages(CPU)
    read = world.read()
    cases = [
        ({"pages": replace(good, means=good.means[:, :1])}, "means"),
        ({"pages": replace(good, means=good.means.double())}, "means"),
        ({"pages": replace(good, means=good.means[:2])}, "block"),
        ({"pages": replace(good, layer=7)}, "layer"),
        ({"pages": replace(good, softcap=0.0)}, "softcap"),
        ({"pages": "means"}, "pages"),
        ({"read": (read.entries, read.offsets)}, "read"),
        ({"read": replace(read, offsets=read.offsets[:-1])}, "read_offsets"),
        ({"read": replace(read, offsets=read.offsets + 99)}, "read_offsets"),
        ({"entry_offsets": world.offsets[:-1]}, "entry_offsets"),
        ({"q": world.q[:1]}, "attended"),
        ({"q": world.q[..., :8].contiguous()}, "attended|head_dim"),
        ({"attended": (world.attended[0].double(), world.attended[1])}, "attended"),
        ({"attended": (world.attended[0], world.attended[1].double())}, "lse of attended"),
        ({"attended": (world.attended[0].mT.contiguous().mT, world.attended[1])}, "attended"),
    ]
    for changed, word in cases:
        for version in (CPU, REFERENCE):
            with pytest.raises(InvalidArgument, match=word):
                world.call(version, **changed)
