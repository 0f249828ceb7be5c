"""Heads with tables, pages, windows and sinks of their own, in every version, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import InvalidArgument, ops
from paged import Paged, dense_attention, paged, rope_table
from versions import CPU, RUNNABLE, VERSIONS, needs_cuda

HEADS, GROUP, DIM = 3, 2, 64


def seen_by(rows: torch.Tensor, tokens: int, head: list[int], held: range) -> torch.Tensor:
    """[R, T]: keys that a row sees through a head whose table holds some positions."""
    _, _, window, sink = head
    keys, rows = torch.arange(tokens), rows[:, None]
    near = (keys > rows - window) | (keys < sink) if window else torch.ones_like(keys, dtype=bool)
    return (keys <= rows) & near & (keys >= held.start) & (keys < held.stop)


def wanted_of(case: Paged, q, rows, heads, held, edge: tuple[int, int]):
    """out, lse, mass, edge share, one KV head at a time."""
    tokens = case.k.shape[1]
    outs, lses, masses, shares = [], [], [], []
    for g, head in enumerate(heads):
        mask = seen_by(rows, tokens, head, held[head[0]])
        of_group = q[:, g * GROUP : (g + 1) * GROUP]
        k, v = (x[0, :, head[1] : head[1] + 1] for x in (case.k, case.v))
        out, lse, weights = dense_attention(of_group, k, v, mask, DIM**-0.5)
        near = seen_by(rows, tokens, [0, 0, *edge], range(tokens))
        far = mask & ~near
        outs.append(out)
        lses.append(lse)
        masses.append(weights.sum((0, 1)))
        shares.append((weights * far[:, None]).sum(-1))
    return torch.cat(outs, 1), torch.cat(lses, 1), sum(masses), torch.cat(shares, 1)


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 90),
    first=st.integers(0, 5),
    windows=st.tuples(*[st.sampled_from([0, 1, 7, 33, 2**31 - 1])] * HEADS),
    sinks=st.tuples(*[st.sampled_from([0, 1, 5, 40])] * HEADS),
    tables=st.tuples(*[st.integers(0, 1)] * HEADS),
    ranks=st.permutations(range(HEADS)),
    edge=st.tuples(st.sampled_from([1, 10, 64]), st.sampled_from([0, 4])),
    decode=st.booleans(),
    seed=st.integers(0, 2**16),
    version=st.sampled_from(RUNNABLE),
)
def test_heads_read_their_own(
    tokens, first, windows, sinks, tables, ranks, edge, decode, seed, version
) -> None:
    generator = torch.Generator().manual_seed(seed)
    case = paged(generator, tokens, layers=1, kv_heads=HEADS, head_dim=DIM)
    heads = [list(row) for row in zip(tables, ranks, windows, sinks, strict=True)]
    short = case.entries[min(first, len(case.entries) - 1) :]
    entries = np.concatenate((case.entries, short))
    held = [range(tokens), range(int(short[0, 3]), tokens)]
    offsets = np.array([0, len(case.entries), len(entries)], np.int32)
    reach = ops.Reach(2, np.array(heads, np.int32))
    rows = torch.randint(0, tokens, (1 if decode else 6,), generator=generator).int()
    q = torch.randn(len(rows), HEADS * GROUP, DIM, generator=generator)
    chosen = {
        "kv_heads": HEADS,
        "scale": DIM**-0.5,
        "rope": rope_table(1, DIM),
        "reach": reach,
        "entry_offsets": offsets,
    }
    given = (q, rows.numpy(), entries, case.pages, 0)
    out, lse = (version.attend_decode if decode else version.attend_prefill)(*given, **chosen)
    share = torch.full((len(rows), HEADS * GROUP), torch.nan)
    mass = version.score_tokens(*given, **chosen, edge=ops.EdgeMass(share, *edge))
    wanted = wanted_of(case, q, rows, heads, held, edge)
    for got, right in zip((out, lse, mass, share), wanted, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("window", [None, 20])
def test_equal_heads_are_no_reach(generator, version, window) -> None:
    case = paged(generator, 70, layers=2, kv_heads=2)
    rows = np.array([0, 33, 69], np.int32)
    q = torch.randn(3, 4, 64, generator=generator)
    chosen = {"kv_heads": 2, "scale": 0.125, "rope": rope_table(2, 64)}
    heads = np.array([[0, 2 + g, window or 0, 0] for g in range(2)], np.int32)
    reach = ops.Reach(1, heads)
    given = (q, rows, case.entries, case.pages, 1)
    plain = version.attend_prefill(*given, window=window, **chosen)
    through = version.attend_prefill(*given, reach=reach, **chosen)
    for a, b in zip(plain, through, strict=True):
        assert torch.equal(a, b)


def test_a_reach_shows_what_it_was_given() -> None:
    heads = np.array([[0, 1, 2, 3], [1, 0, 0, 0]], np.int32)
    reach = ops.Reach(2, heads)
    heads[:] = 9
    assert reach.tables == 2
    assert reach.heads.tolist() == [[0, 1, 2, 3], [1, 0, 0, 0]]
    assert repr(reach) == "Reach(tables=2, heads=[[0, 1, 2, 3], [1, 0, 0, 0]])"
    for tables, rows, words in [
        (0, heads, "tables: expected at least 1, got 0"),
        (-1, heads, "tables: expected at least 0, got -1"),
        (1, heads[:, :3], "heads: expected shape"),
        (1, heads.astype(np.int64), "heads: expected int32, got int64"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            ops.Reach(tables, np.ascontiguousarray(rows))


BAD = [
    ([[0, 0, 0, 0]], None, "heads of reach: expected 2 rows"),
    ([[1, 0, 0, 0], [0, 1, 0, 0]], None, "table of a head: expected a table from 0 to 0"),
    ([[0, -1, 0, 0], [0, 1, 0, 0]], None, "rank of a head: expected at least 0"),
    ([[0, 0, -1, 0], [0, 1, 0, 0]], None, "window of a head: expected at least 0"),
    ([[0, 10**6, 0, 0], [0, 1, 0, 0]], None, "rank of a head: expected a page within"),
    ([[0, 0, 0, 0], [0, 1, 0, 0]], 5, "window: expected none beside a reach"),
]


@pytest.mark.parametrize(("heads", "window", "words"), BAD)
@pytest.mark.parametrize("version", [CPU, pytest.param(RUNNABLE[-1], marks=needs_cuda)])
def test_a_reach_is_checked_by_the_op(generator, version, heads, window, words) -> None:
    case = paged(generator, 20, layers=1, kv_heads=2)
    q, rows = torch.zeros(1, 2, 64), np.array([19], np.int32)
    reach = ops.Reach(1, np.array(heads, np.int32))
    if version.tables_there and "page within" in words:
        return
    with pytest.raises(InvalidArgument, match=words):
        version.attend_prefill(
            q,
            rows,
            case.entries,
            case.pages,
            0,
            kv_heads=2,
            scale=1.0,
            rope=rope_table(1, 64),
            window=window,
            reach=reach,
        )
