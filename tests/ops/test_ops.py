"""Every version of the ops against torch: attention, windows, soft caps, batches, rotations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.stablelm import modeling_stablelm

from kvweave import ops
from paged import Paged, causal_mask, dense_attention, paged, rope_table, rotated
from versions import RUNNABLE, VERSIONS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest error of one rounding of a number near 1, a little more for f32 sums."""


def positions_of(tokens: int) -> np.ndarray:
    """Every row, shuffled: the order of rows says nothing."""
    return np.random.default_rng(1).permutation(tokens).astype(np.int32)


def settings_of(case: Paged, rope: ops.RopeTable | None = None, **more: object) -> dict:
    _, _, kv_heads, head_dim = case.k.shape
    rope = rope or rope_table(case.k.shape[0], head_dim)
    return {"kv_heads": kv_heads, "scale": head_dim**-0.5, "rope": rope, **more}


def near(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, slack: float = 4) -> None:
    limit = slack * CLOSE[dtype]
    torch.testing.assert_close(got.double(), wanted.double(), rtol=limit, atol=limit)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
def test_attention_is_torchs(generator, version, dtype, head_dim) -> None:
    tokens, heads = 45, 6
    case = paged(generator, tokens, kv_heads=2, head_dim=head_dim, dtype=dtype)
    rows = positions_of(tokens)
    q = torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)
    for layer in range(2):
        out, lse = version.attend_prefill(
            q, rows, case.entries, case.pages, layer, **settings_of(case)
        )
        mask = causal_mask(torch.from_numpy(rows), tokens)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(x.double().transpose(0, 1) for x in (q, case.k[layer], case.v[layer])),
            attn_mask=mask,
            enable_gqa=True,
        ).transpose(0, 1)
        near(out, wanted, dtype)
        _, wanted_lse, _ = dense_attention(q, case.k[layer], case.v[layer], mask, head_dim**-0.5)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128])
def test_pages_of_every_size(generator, version, head_dim, page_tokens) -> None:
    """Copies on a GPU are cut by it: two tiles of keys, the last page not full."""
    tokens = 200
    case = paged(
        generator,
        tokens,
        layers=1,
        head_dim=head_dim,
        page_tokens=page_tokens,
        dtype=torch.bfloat16,
    )
    rows = positions_of(tokens)[:24]
    q = torch.randn(len(rows), 6, head_dim, generator=generator).bfloat16()
    for window in (None, 90):
        chosen = settings_of(case, window=window)
        out, _ = version.attend_prefill(q, rows, case.entries, case.pages, 0, **chosen)
        mask = causal_mask(torch.from_numpy(rows), tokens, window)
        wanted, _, _ = dense_attention(q, case.k[0], case.v[0], mask, chosen["scale"])
        near(out, wanted, torch.bfloat16)


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 70),
    page_tokens=st.sampled_from([8, 16, 32]),
    window=st.none() | st.integers(1, 80),
    softcap=st.none() | st.floats(0.5, 50),
    version=st.sampled_from(RUNNABLE),
    seed=st.integers(0, 2**16),
)
def test_windows_and_caps(tokens, page_tokens, window, softcap, version, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    case = paged(generator, tokens, layers=1, head_dim=16, page_tokens=page_tokens)
    rows = torch.randint(0, tokens, (min(tokens, 9),), generator=generator).int()
    q = 3 * torch.randn(len(rows), 4, 16, generator=generator)
    chosen = settings_of(case, window=window, softcap=softcap)
    out, lse = version.attend_prefill(q, rows, case.entries, case.pages, 0, **chosen)
    mask = causal_mask(rows, tokens, window)
    wanted, wanted_lse, weights = dense_attention(
        q, case.k[0], case.v[0], mask, chosen["scale"], softcap
    )
    torch.testing.assert_close(out.double(), wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=2e-5, atol=2e-5)
    mass = version.score_tokens(q, rows, case.entries, case.pages, 0, **chosen)
    torch.testing.assert_close(mass.double(), weights.sum((0, 1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_row_that_sees_no_key(generator, version) -> None:
    case = paged(generator, 20, layers=1)
    q = torch.randn(2, 4, 64, generator=generator)
    entries = case.entries[1:]
    rows = np.array([3, 19], np.int32)
    out, lse = version.attend_prefill(q, rows, entries, case.pages, 0, **settings_of(case))
    assert (out[0] == 0).all()
    assert torch.isneginf(lse[0]).all()
    assert torch.isfinite(lse[1]).all()
    none = np.zeros((0, 5), np.int32)
    out, lse = version.attend_prefill(q, rows, none, case.pages, 0, **settings_of(case))
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
    nothing = version.score_tokens(q, rows, none, case.pages, 0, **settings_of(case))
    assert nothing.shape == (0,)


@pytest.mark.parametrize("version", VERSIONS)
def test_nan_stays_with_those_who_read_it(generator, version) -> None:
    case = paged(generator, 40, layers=1)
    block, slot = (int(x) for x in case.request.slots(np.array([30], np.int32))[0])
    case.pages[block, 1, slot] = torch.nan
    rows = np.array([29, 30, 39], np.int32)
    q = torch.randn(3, 2, 64, generator=generator)
    out, _ = version.attend_prefill(q, rows, case.entries, case.pages, 0, **settings_of(case))
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1:, 0]).all()


@pytest.mark.parametrize("version", VERSIONS)
def test_decode_of_a_batch_is_prefill_of_each(generator, version) -> None:
    cases = [paged(generator, tokens, layers=1) for tokens in (5, 16, 33)]
    pages = torch.cat([case.pages for case in cases])
    tables, at = [], 0
    for case in cases:
        tables.append(case.entries + np.array([at, 0, 0, 0, 0], np.int32))
        at += len(case.pages)
    offsets = np.cumsum([0, *map(len, tables)], dtype=np.int32)
    rows = np.array([4, 15, 32], np.int32)
    q = torch.randn(3, 4, 64, generator=generator)
    chosen = settings_of(cases[0])
    joined = np.concatenate(tables)
    out, lse = version.attend_decode(q, rows, joined, pages, 0, entry_offsets=offsets, **chosen)
    each = [
        version.attend_prefill(q[i : i + 1], rows[i : i + 1], table, pages, 0, **chosen)
        for i, table in enumerate(tables)
    ]
    near(out, torch.cat([o for o, _ in each]), torch.float32)
    near(lse, torch.cat([s for _, s in each]), torch.float32)
    batch, _ = version.attend_prefill(
        q,
        rows,
        joined,
        pages,
        0,
        row_offsets=np.arange(4, dtype=np.int32),
        entry_offsets=offsets,
        **chosen,
    )
    near(batch, out, torch.float32)


@pytest.mark.parametrize("version", VERSIONS)
def test_merging_parts_is_attention_over_all(generator, version) -> None:
    case = paged(generator, 64, layers=1)
    rows = np.array([63, 40, 20], np.int32)
    q = torch.randn(3, 4, 64, generator=generator)
    chosen = settings_of(case)
    parts = [
        version.attend_prefill(q, rows, case.entries[cut], case.pages, 0, **chosen)
        for cut in (slice(0, 1), slice(1, 3), slice(3, 4))
    ]
    out, lse = version.merge_states(
        torch.stack([o for o, _ in parts]), torch.stack([s for _, s in parts])
    )
    whole, whole_lse = version.attend_prefill(q, rows, case.entries, case.pages, 0, **chosen)
    near(out, whole, torch.float32)
    near(lse, whole_lse, torch.float32)


@settings(max_examples=60)
@given(
    splits=st.integers(1, 9),
    states=st.sampled_from([(0, 4), (1, 1), (3, 4), (70, 2)]),
    head_dim=st.sampled_from([1, 7, 8, 80, 128, 576]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
    version=st.sampled_from(RUNNABLE),
)
def test_merging_is_a_softmax_over_parts(splits, states, head_dim, dtype, seed, version) -> None:
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(splits, *states, head_dim, generator=generator).to(dtype)
    lses = 30 * torch.randn(splits, *states, generator=generator)
    lses[torch.rand(lses.shape, generator=generator) < 0.3] = -torch.inf
    outs[lses == -torch.inf] = torch.nan
    out, lse = version.merge_states(outs, lses)
    wanted = lses.double().logsumexp(0)
    weights = (lses.double() - wanted).exp().nan_to_num(0.0)
    vectors = torch.where(weights[..., None] > 0, outs.double(), 0.0)
    torch.testing.assert_close(lse.double(), wanted, rtol=1e-6, atol=1e-5)
    near(out, (weights[..., None] * vectors).sum(0), dtype)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_one_part_changes_no_bit(generator, dtype, version) -> None:
    outs = torch.randn(1, 5, 3, 64, generator=generator).to(dtype)
    lses = torch.randn(1, 5, 3, generator=generator)
    out, lse = version.merge_states(outs, lses)
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])


@pytest.mark.parametrize("version", VERSIONS)
def test_merging_keeps_nan_where_it_is(version) -> None:
    outs, lses = torch.ones(2, 4, 1, 8), torch.zeros(2, 4, 1)
    lses[0, 1] = torch.nan
    lses[:, 2] = -torch.inf
    outs[1, 3, 0, 5] = torch.nan
    out, lse = version.merge_states(outs, lses)
    assert (out[0] == 1).all()
    assert torch.isnan(out[1]).all()
    assert torch.isnan(lse[1]).all()
    assert (out[2] == 0).all()
    assert torch.isneginf(lse[2]).all()
    assert torch.isnan(out[3, 0]).tolist() == [d == 5 for d in range(8)]
    assert torch.isfinite(lse[[0, 3]]).all()


def moved(case: Paged, entries: np.ndarray, delta: int) -> tuple[np.ndarray, np.ndarray]:
    """Copies of a request's blocks to fresh ones, and the entries of the copy."""
    spare = case.cache.admit(np.full(len(case.k[0]), 7, np.int32), reuse="none")
    target = spare.entries()
    columns = (entries[:, 0], entries[:, 1], target[:, 0], target[:, 1])
    count, step = entries[:, 2] - entries[:, 1], np.full(len(entries), delta)
    return np.stack((*columns, count, step), 1).astype(np.int32), target


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [64, 24])
@pytest.mark.parametrize("dtype", DTYPES)
def test_share_is_materialise(generator, dtype, rotary_dim, pairing, version) -> None:
    tokens, delta = 40, 117
    case = paged(generator, tokens, dtype=dtype)
    rope = rope_table(2, rotary_dim, pairing)
    shared = case.entries.copy()
    shared[:, 3] += delta
    shared[:, 4] = delta
    copies, target = moved(case, case.entries, delta)
    version.copy_rerotate(case.pages, copies, rope, kv_heads=2)
    target[:, 3] += delta
    rows = (np.arange(tokens) + delta).astype(np.int32)
    q = torch.randn(tokens, 4, 64, generator=generator).to(dtype)
    chosen = settings_of(case, rope)
    for layer in range(2):
        a, _ = version.attend_prefill(q, rows, shared, case.pages, layer, **chosen)
        b, _ = version.attend_prefill(q, rows, target, case.pages, layer, **chosen)
        near(a, b, dtype, slack=16)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 16, 40])
@pytest.mark.parametrize("layers", [None, [1, 0, 1, 0]])
def test_blocks_are_read_in_another_arena(generator, layers, size, dtype, pairing, version) -> None:
    """Pages of other sizes, of which nothing but the copied slots is read or written."""
    # Slices, as a layer's pages of a larger arena are.
    cache = torch.randn(23, 2, 16, 64, generator=generator).to(dtype)[3:]
    source = torch.randn(29, 2, size, 64, generator=generator).to(dtype)[1:]
    before, apart = cache.clone(), source.clone()
    of_pages = None if layers is None else np.array(layers, np.int32)
    # Blocks of 2 layers and 2 heads; the same number there and here, and one read twice.
    copies = np.array([[4, 1, 4, 9, 7, 30], [24, 0, 8, 0, 8, 0], [4, 5, 12, 2, 3, -700]], np.int32)
    rope = rope_table(2, 64, pairing)
    version.copy_rerotate(cache, copies, rope, kv_heads=2, layers=of_pages, source=source)
    assert torch.equal(source, apart)
    for src_block, src_slot, dst_block, dst_slot, count, delta in copies.tolist():
        for page in range(4):
            read = source[src_block + page, :, src_slot : src_slot + count]
            wrote = cache[dst_block + page, :, dst_slot : dst_slot + count]
            assert torch.equal(wrote[1], read[1])
            layer = page // 2 if layers is None else layers[page]
            frequencies = torch.from_numpy(rope.inv_freq)[layer]
            steps = torch.full((count,), delta)
            wanted = rotated(read[0][:, None], frequencies, steps, pairing)[:, 0]
            length = wanted.abs().amax(-1, keepdim=True)
            assert float(((wrote[0].double() - wanted).abs() / length).max()) <= CLOSE[dtype]
            before[dst_block + page, :, dst_slot : dst_slot + count] = wrote
    assert torch.equal(cache, before)


KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + i / 8 for i in range(16)],
        "original_max_position_embeddings": 128,
    },
}
FAMILIES = {
    "llama": (modeling_llama, modeling_llama.LlamaRotaryEmbedding, "half", 1.0),
    "stablelm": (modeling_stablelm, modeling_stablelm.StableLmRotaryEmbedding, "half", 0.5),
    "glm": (modeling_glm, modeling_glm.GlmRotaryEmbedding, "interleaved", 0.5),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("llama", kind) for kind in KINDS), ("stablelm", "default"), ("glm", "default")],
)
def test_moving_a_key_is_rope_at_the_new_position(generator, family, kind, version) -> None:
    module, rotary_class, pairing, factor = FAMILIES[family]
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": kind,
            "rope_theta": 1e4,
            "partial_rotary_factor": factor,
            **KINDS[kind],
        },
    )
    rotary, tokens, delta = rotary_class(config), 24, 530
    cos, sin = rotary(torch.zeros(1), torch.arange(600)[None])
    raw = torch.randn(tokens, 2, 32, generator=generator)

    def at(first: int) -> torch.Tensor:
        span = slice(first, first + tokens)
        dense = raw.transpose(0, 1)[None, ..., : cos.shape[-1]]
        _, k = module.apply_rotary_pos_emb(dense, dense, cos[:, span], sin[:, span])
        return torch.cat((k[0].transpose(0, 1), raw[..., cos.shape[-1] :]), -1)

    case = paged(generator, tokens, layers=1, head_dim=32)
    rows = np.arange(tokens, dtype=np.int32)
    version.write_pages(case.pages, 0, at(3), case.v[0], case.request.slots(rows))
    rope = ops.RopeTable(rotary.inv_freq[None].contiguous(), pairing)
    copies, target = moved(case, case.entries, delta)
    version.copy_rerotate(case.pages, copies, rope, kv_heads=2)
    slots = np.concatenate([[(e[0], s) for s in range(e[1], e[2])] for e in target.tolist()])
    page, slot = torch.from_numpy(slots).long().T
    got = torch.stack([case.pages[page + head, 0, slot] for head in range(2)], 1)
    # transformers rounds the angle itself to f32: near position 550 that is 3e-5 radians.
    torch.testing.assert_close(got, at(3 + delta), rtol=0, atol=2e-4)
    values = torch.stack([case.pages[page + head, 1, slot] for head in range(2)], 1)
    assert torch.equal(values, case.v[0])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("delta", [0, 1, -7, 1_000_000, -1_000_000])
def test_huge_deltas_lose_nothing(generator, dtype, delta, version) -> None:
    case = paged(generator, 16, layers=1, dtype=dtype)
    rope = rope_table(1, 64)
    copies, target = moved(case, case.entries, delta)
    version.copy_rerotate(case.pages, copies, rope, kv_heads=2)
    block = int(target[0, 0])
    got = case.pages[block : block + 2, 0].transpose(0, 1)
    steps = torch.full((16,), delta)
    wanted = rotated(case.k[0], torch.from_numpy(rope.inv_freq[0]), steps)
    if delta == 0:
        assert torch.equal(got, case.k[0])
    else:
        size = case.k[0].double().abs().amax(-1, keepdim=True)
        assert float(((got.double() - wanted).abs() / size).max()) <= CLOSE[dtype]


@pytest.mark.parametrize("version", VERSIONS)
def test_strided_rows_are_written_as_they_are(generator, version) -> None:
    case = paged(generator, 20, layers=1)
    wide = torch.randn(20, 5, 2, 128, generator=generator)
    k, v = wide[:, 1, :, :64], wide.transpose(1, 2)[:, :, 3, 64:]
    rows = np.arange(20, dtype=np.int32)
    version.write_pages(case.pages, 0, k, v, case.request.slots(rows))
    page, slot = torch.from_numpy(case.request.slots(rows)).long().T
    for head in range(2):
        assert torch.equal(case.pages[page + head, 0, slot], k[:, head])
        assert torch.equal(case.pages[page + head, 1, slot], v[:, head])


@pytest.mark.parametrize("version", VERSIONS)
def test_results_go_where_they_are_wanted(generator, version) -> None:
    case = paged(generator, 20, layers=1)
    q = torch.randn(3, 4, 64, generator=generator)
    rows = np.array([0, 10, 19], np.int32)
    room = torch.full((3, 4, 64), torch.nan)
    out, _ = version.attend_prefill(
        q, rows, case.entries, case.pages, 0, out=room, **settings_of(case)
    )
    assert out is room
    assert torch.isfinite(room).all()


@pytest.mark.parametrize("version", VERSIONS)
def test_strided_queries_and_subsets_change_no_bit(generator, version) -> None:
    case = paged(generator, 70, layers=1)
    wide = torch.randn(70, 3, 4, 64, generator=generator)
    q = wide[:, 1]
    rows = np.arange(70, dtype=np.int32)
    whole, _ = version.attend_prefill(q, rows, case.entries, case.pages, 0, **settings_of(case))
    some = [69, 3, 40]
    part, _ = version.attend_prefill(
        q[some], rows[some], case.entries, case.pages, 0, **settings_of(case)
    )
    assert torch.equal(part, whole[some])
