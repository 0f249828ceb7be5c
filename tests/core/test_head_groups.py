"""Batches whose head groups have blocks of their own and keep no more than their heads see."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import InvalidArgument, ops
from paged import causal_mask, dense_attention, reads, rope_table
from versions import CPU, REFERENCE, RUNNABLE, VERSIONS

P, D, GROUP = 8, 16, 2


@dataclass
class Grouped:
    """Requests whose heads read tables of their own: K, V [T, G, D] of each, and the pages."""

    heads: np.ndarray
    """i32 [G, 4]: table, rank, window, sink."""
    tables: int
    rows: list[np.ndarray] = field(default_factory=list)
    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)
    pages: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    entries: np.ndarray = field(default_factory=lambda: np.empty((0, 5), np.int32))
    offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))

    @property
    def row_offsets(self) -> np.ndarray:
        return np.cumsum([0] + [len(rows) for rows in self.rows], dtype=np.int32)

    @property
    def positions(self) -> np.ndarray:
        return np.concatenate(self.rows)

    def mask(self, request: int, window: int, sink: int) -> torch.Tensor:
        """[R, T]: what the rows of a request see with a window (0: all) and a sink."""
        rows, tokens = torch.from_numpy(self.rows[request]), len(self.k[request])
        start = causal_mask(rows, tokens) & (torch.arange(tokens) < sink)
        return causal_mask(rows, tokens, window or None) | start

    def given(self, generator: torch.Generator) -> tuple:
        q = torch.randn(len(self.positions), GROUP * len(self.heads), D, generator=generator)
        return q, self.positions, self.entries, self.pages, 0

    def named(self, **more: object) -> dict:
        reach = ops.Reach(self.tables, self.heads)
        settings = {"kv_heads": len(self.heads), "scale": 0.3, "rope": rope_table(1, D)}
        return settings | {"reach": reach, "entry_offsets": self.offsets} | more


def grouped(
    generator: torch.Generator,
    requests: list[tuple[int, int]],
    classes: list[tuple[int, int, int]],
    tables: int,
) -> Grouped:
    """Requests of (tokens, rows); a (table, window, sink) a KV head.

    A block of a table has a page for each of its heads and some for other layers. Blocks that no
    row of the request sees are left out, and all that nobody wrote is NaN.
    """
    numbers = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
    of_table = [[g for g, c in enumerate(classes) if c[0] == table] for table in range(tables)]
    rank = {g: 2 * i + 1 for heads in of_table for i, g in enumerate(heads)}
    heads = [(table, rank[g], *rest) for g, (table, *rest) in enumerate(classes)]
    case = Grouped(np.array(heads, np.int32), tables)
    blocks: list[tuple[int, int, int]] = []
    offsets = [0]
    for request, (tokens, rows) in enumerate(requests):
        case.rows.append(numbers.integers(0, tokens, rows).astype(np.int32))
        k, v = torch.randn(2, tokens, len(classes), D, generator=generator)
        case.k.append(k)
        case.v.append(v)
        for table in range(tables):
            seen = torch.zeros(tokens, dtype=torch.bool)
            for g in of_table[table]:
                seen |= case.mask(request, *classes[g][1:]).any(0)
            blocks += [
                (request, table, at) for at in range(0, tokens, P) if seen[at : at + P].any()
            ]
            offsets.append(len(blocks))
    sizes = [2 * len(of_table[table]) + 1 for _, table, _ in blocks]
    first = np.zeros(len(blocks), np.int64)
    order = numbers.permutation(len(blocks))
    first[order] = 1 + np.cumsum([0] + [sizes[i] for i in order])[:-1]
    case.pages = torch.full((1 + sum(sizes), 2, P, D), torch.nan)
    for block, (request, table, at) in zip(first, blocks, strict=True):
        tokens = slice(at, at + P)
        for g in of_table[table]:
            k, v = case.k[request][tokens, g], case.v[request][tokens, g]
            case.pages[block + rank[g], 0, : len(k)] = k
            case.pages[block + rank[g], 1, : len(v)] = v
    ends = [min(P, len(case.k[request]) - at) for request, _, at in blocks]
    entries = [(b, 0, n, at, 0) for b, n, (_, _, at) in zip(first, ends, blocks, strict=True)]
    case.entries = np.array(entries, np.int32).reshape(-1, 5)
    case.offsets = np.array(offsets, np.int32)
    return case


def wanted(case: Grouped, q: torch.Tensor, softcap: float | None = None):
    """Masked dense attention head by head: out, lse, and weights [R, H, T] of each request."""
    outs, lses, weights = [], [], []
    for request, (begin, end) in enumerate(pairwise(case.row_offsets)):
        parts = []
        for g, (_, _, window, sink) in enumerate(case.heads.tolist()):
            mask = case.mask(request, window, sink)
            k, v = case.k[request][:, g : g + 1], case.v[request][:, g : g + 1]
            some = q[begin:end, g * GROUP : (g + 1) * GROUP]
            parts.append(dense_attention(some, k, v, mask, 0.3, softcap))
        out, lse, weight = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        outs.append(out)
        lses.append(lse)
        weights.append(weight)
    return torch.cat(outs), torch.cat(lses), weights


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=3e-5, atol=3e-5)


CLASSES = st.tuples(st.integers(0, 1), st.sampled_from([0, 1, 9, 40]), st.sampled_from([0, 3, 20]))


@settings(max_examples=50)
@given(
    requests=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 5)), min_size=1, max_size=3),
    classes=st.lists(CLASSES, min_size=1, max_size=4),
    softcap=st.none() | st.floats(0.5, 50),
    version=st.sampled_from(RUNNABLE),
    seed=st.integers(0, 2**16),
)
def test_local_heads_are_masked_dense_ones(requests, classes, softcap, version, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    case = grouped(generator, requests, classes, 2)
    given = case.given(generator)
    named = case.named(softcap=softcap, row_offsets=case.row_offsets)
    out, lse = version.attend_prefill(*given, **named)
    expected, expected_lse, _ = wanted(case, given[0], softcap)
    near(out, expected)
    near(lse, expected_lse)


@pytest.mark.parametrize("version", VERSIONS)
def test_decode_of_a_batch(generator, version) -> None:
    classes = [(0, 0, 0), (1, 64, 4), (1, 200, 4), (2, 30, 100)]
    case = grouped(generator, [(700, 1), (1, 1), (90, 1)], classes, 3)
    given = case.given(generator)
    out, lse = version.attend_decode(*given, **case.named())
    expected, expected_lse, _ = wanted(case, given[0])
    near(out, expected)
    near(lse, expected_lse)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("window", "sink"), [(1, 0), (16, 4), (1000, 0)])
def test_scores_and_their_edge(generator, version, window, sink) -> None:
    case = grouped(generator, [(150, 7)], [(0, 0, 0), (1, 40, 3), (1, 64, 0)], 2)
    given = case.given(generator)
    share = torch.full((7, 6), torch.nan)
    edge = ops.EdgeMass(share, window, sink)
    mass = version.score_tokens(*given, **case.named(edge=edge))
    [weights] = wanted(case, given[0])[2]
    near(mass, weights.sum((0, 1))[: len(mass)])
    assert weights.sum((0, 1))[len(mass) :].sum() == 0
    near(share, (weights * ~case.mask(0, window, sink)[:, None]).sum(-1))


def small(generator: torch.Generator) -> Grouped:
    return grouped(generator, [(30, 2)], [(0, 0, 0), (1, 9, 2)], 2)


@pytest.mark.parametrize("version", [CPU, REFERENCE], ids=lambda version: version.name)
def test_offsets_that_do_not_fit_the_tables(generator, version) -> None:
    case = small(generator)
    given = case.given(generator)
    for changes in [
        {"reach": ops.Reach(3, case.heads)},
        {"entry_offsets": case.offsets[:-1]},
        {"entry_offsets": np.append(case.offsets, case.offsets[-1])},
        {"entry_offsets": None},
    ]:
        for op in (version.attend_prefill, version.score_tokens):
            with pytest.raises(InvalidArgument, match="entry_offsets: expected"):
                op(*given, **case.named(**changes))


@pytest.mark.parametrize("version", [CPU, REFERENCE], ids=lambda version: version.name)
@pytest.mark.parametrize(
    ("share", "window", "sink", "what"),
    [
        (torch.zeros(2, 5), 4, 0, "edge"),
        (torch.zeros(8), 4, 0, "edge"),
        (torch.zeros(2, 4, dtype=torch.float64), 4, 0, "edge"),
        (torch.zeros(2, 8)[:, ::2], 4, 0, "edge"),
        (torch.zeros(2, 4), 0, 0, "window"),
        (torch.zeros(2, 4), -1, 0, "window"),
        (torch.zeros(2, 4), 4, -1, "sink"),
    ],
)
def test_an_edge_that_cannot_be(generator, version, share, window, sink, what) -> None:
    case = small(generator)
    edge = ops.EdgeMass(share, window, sink)
    with pytest.raises(InvalidArgument, match=f"{what}.*: expected"):
        version.score_tokens(*case.given(generator), **case.named(edge=edge))


def test_an_edge_is_written_to_memory_of_its_own(generator) -> None:
    case = small(generator)
    given = case.given(generator)
    edge = ops.EdgeMass(given[0].view(-1)[:8].view(2, 4), 4, 0)
    with pytest.raises(InvalidArgument, match="edge: expected memory of its own"):
        reads(ops.score_tokens, *given, **case.named(edge=edge))
