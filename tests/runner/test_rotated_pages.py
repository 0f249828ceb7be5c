"""A runner whose pages are packed in another format than INT4, with or without a basis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from document_decoding import DocumentDecoding, documents, fresh, insert_all
from families import random_tokens, tiny
from kvweave import InvalidArgument, ops
from kvweave.runner import Packing
from kvweave.runner.kv.pool_bases import QUERY_ROWS, SHARED, SHARED_TOKENS, UNROTATED
from packed_decoding import (
    PackedDecoding,
    SeenDecoding,
    apart,
    nothing_is_held,
    packed_runner,
    steps_of,
)
from page_meaning import UNNAMED, Layer, of_format, random_packing
from ranked_pages import logits_of_steps

STEPS = 70
NAMES = ["half-int4", "quarter-bf16", "planes-3"]
FORMATS = ["int8", *NAMES]
SIZES = {"head_dim": 64, "max_position_embeddings": 4096, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", **SIZES)


def pages_of(model: Any) -> int:
    """Pages of a block."""
    return int(model.config.num_hidden_layers * model.config.num_key_value_heads)


def expect_definition(
    logits: list[Any], wanted: list[Any], unpacked: list[Any], name: str = ""
) -> None:
    """That logits are the wanted ones, and not those over exact KV.

    But for rounding nothing differs, save at the edge of two codes. In INT8 pages a scale at the
    edge of two numbers of bf16 moves all that shares it, by as much as packing does.
    """
    effect, error = apart(unpacked, wanted), apart(logits, wanted)
    assert effect > 1e-4
    assert error < (0.5 if name == "int8" else 0.02) * effect


# ---- what is said ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FORMATS, *UNNAMED])
@pytest.mark.parametrize(
    ("family", "count", "chunk", "page_tokens"),
    [("llama", 500, 96, 64), ("qwen3", 300, 2048, 16)],
)
def test_it_is_the_definition(
    name: str, family: str, count: int, chunk: int, page_tokens: int
) -> None:
    """Prefill in chunks and decode steps over packed pages, against what these stand for."""
    model, tokens = tiny(family, **SIZES), random_tokens(count, count)
    packing, meaning = random_packing(name, pages_of(model), 64)
    runner = packed_runner(model, kv_dtype=packing, chunk_tokens=chunk, page_tokens=page_tokens)
    said, logits = logits_of_steps(runner, tokens, STEPS)
    doubles = (PackedDecoding(model, page_tokens, of) for of in (meaning, None))
    wanted, others = (
        [each.prefill(tokens, chunk), *(each.step(token) for token in said[:-1])]
        for each in doubles
    )
    expect_definition(logits, wanted, others, name)
    assert nothing_is_held(runner)


@pytest.mark.parametrize("name", [*FORMATS, *UNNAMED])
def test_documents_are_read_as_what_they_stand_for(name: str, model: Any) -> None:
    """At any position, in the basis that they were packed in."""
    docs = documents([300, 40, 129])
    prompt = [fresh(70, 1), docs[0], docs[1], docs[2], fresh(30, 2)]
    packing, meaning = random_packing(name, pages_of(model), 64)
    runner = packed_runner(model, kv_dtype=packing, max_tokens=16384, chunk_tokens=150)
    insert_all(runner, docs)
    asked = {"reserve_tokens": 200, "remember": False, "watched": False}
    with runner.prefill(prompt, "naive", **asked) as done:
        sequence = decoding(runner, done, 200)
        logits = [done.logits[-1], *steps_of(runner, sequence, 199)]
        said = sequence.tokens
    firsts = {"exact_first": runner.packed.first_tokens}
    doubles = (DocumentDecoding(model, 150, 16, of, **firsts) for of in (meaning, None))
    wanted, others = (
        [each.prefill(prompt), *(each.step(token) for token in said[:-1])] for each in doubles
    )
    expect_definition(logits, wanted, others, name)
    for segment in runner.segments():
        runner.delete(segment.name)
    assert nothing_is_held(runner)


@pytest.mark.parametrize("name", ["int8", "half-int4", "planes-3"])
def test_prefixes_batches_and_streams_say_what_each_says_alone(name: str, model: Any) -> None:
    packing, _ = random_packing(name, pages_of(model), 64)
    runner = packed_runner(model, kv_dtype=packing, max_tokens=4096, chunk_tokens=200)
    prompts = [random_tokens(count, count) for count in (63, 150, 777)]
    how = {"max_new_tokens": 70, "remember": False, "stop": []}
    alone = [runner.generate(prompt, **how).tokens for prompt in prompts]
    assert [answer.tokens for answer in runner.generate_batch(prompts, **how)] == alone
    assert [token.token for token in runner.stream(prompts[2], **how)] == alone[2]
    engine = runner.engine(token_budget=400, chunk_tokens=64)
    asked = [engine.submit(prompt, **how) for prompt in prompts]
    engine.run()
    assert [len(request.result().tokens) for request in asked] == [70, 70, 70]
    runner.prefill(prompts[2], "prefix").release()
    with runner.prefill(prompts[2], "prefix") as again:
        assert again.report.reused_prefix == 768
        assert again.logits.isfinite().all()
    assert nothing_is_held(runner)


# ---- bases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_shared_basis_is_made_of_the_first_tokens(name: str, model: Any) -> None:
    """Until there are enough nothing is rotated; pages keep the basis that they were packed in."""
    runner = packed_runner(model, kv_dtype=name, max_tokens=4096)
    pool = runner.packed
    assert pool is not None
    assert pool.bases is not None
    tokens = random_tokens(300, 1)
    with runner.prefill(tokens, "prefix") as few:
        assert pool.bases.shared == UNROTATED
        blocks = few.kv.packed.request.entries()[:4, 0]
        assert (pool.bases.numbers(blocks) == UNROTATED).all()
        unrotated = pool.bases.bases.data[UNROTATED].clone()
        with runner.prefill(random_tokens(SHARED_TOKENS, 2), "prefix") as more:
            assert pool.bases.shared == SHARED
            found = more.kv.packed.request.entries()[:8, 0]
            assert (pool.bases.numbers(found) == SHARED).all()
            assert (pool.bases.numbers(blocks) == UNROTATED).all()
    shared, of = pool.bases.bases.data[SHARED], pool.pages.format
    expect_basis(unrotated, of, axes=True)
    expect_basis(shared, of, axes=False)
    # What was packed before is read in its own basis, beside pages of the other.
    longer = np.concatenate((tokens, random_tokens(300, 3)))
    with runner.prefill(longer, "prefix", reserve_tokens=STEPS) as done:
        assert done.report.reused_prefix == 256
        blocks = done.kv.packed.request.entries()[:9, 0]
        assert pool.bases.numbers(blocks).tolist() == [UNROTATED] * 4 + [SHARED] * 5
        sequence = decoding(runner, done, STEPS + 1)
        logits = [done.logits[-1], *steps_of(runner, sequence, STEPS)]
        said = sequence.tokens
    both = of_format(of, unrotated), of_format(of, shared)

    def meaning(layer: int, text: Layer) -> Layer:
        parts = [
            each(layer, (text[0][:, some], text[1][:, some]))
            for each, some in zip(both, (slice(256), slice(256, None)), strict=True)
            if some.start is None or text[0].shape[1] > some.start
        ]
        keys, values = (torch.cat(sides, 1) for sides in zip(*parts, strict=True))
        return keys, values

    doubles = [PackedDecoding(model, meaning=each) for each in (meaning, None, both[1])]
    answers = []
    for each in doubles:
        each.prefill(longer[:256], 2048)
        each.packed_at_least = 256
        first = each.prefill(longer[256:], 2048)
        answers.append([first, *(each.step(token) for token in said[:-1])])
    expect_definition(logits, *answers[:2])
    expect_definition(logits, answers[0], answers[2])
    assert nothing_is_held(runner)


@pytest.mark.parametrize("name", NAMES)
def test_the_shared_basis_is_of_a_models_own_keys_values_and_queries(name: str, model: Any) -> None:
    """Of whole pages of the first prompt but its first token, and every tenth of its queries."""
    tokens, own = random_tokens(10 * QUERY_ROWS, 4), SeenDecoding(model, meaning=None)
    own.prefill(tokens, 2048)
    runner = packed_runner(model, kv_dtype=name)
    runner.prefill(tokens, "full").release()
    of, heads = runner.packed.pages.format, runner.spec.kv_heads
    moments = ops.Moments(of, pages_of(model))
    exact = torch.zeros(1 + pages_of(model) * 10, 2, 64, 64)
    room = exact[1:].view(10, -1, heads, 2, 64, 64)
    for layer, (_, *sides) in enumerate(own.seen):
        for side, part in enumerate(sides):
            room[:, layer, :, side] = part.view(heads, 10, 64, 64).transpose(0, 1)
    blocks = 1 + pages_of(model) * np.arange(10)
    packs = np.column_stack((blocks, np.full(10, 64), blocks)).astype(np.int32)
    exact[1 : 1 + pages_of(model), :, 0] = torch.inf
    moments.add(exact, packs)
    assert moments.left_out == 2 * pages_of(model)
    for layer, (query, *_) in enumerate(own.seen):
        if name == "planes-3":
            rows = query[:, ::10].transpose(0, 1).contiguous()
            moments.add_queries(rows, first=layer * heads, kv_heads=heads)
    got, wanted = runner.packed.bases.bases.data[SHARED], torch.from_numpy(moments.basis())
    torch.testing.assert_close(got[:, :, 0], wanted[:, :, 0], atol=1e-5, rtol=1e-4)
    # What it makes of vectors is the same, whatever the signs of its directions.
    text = own.seen[0][1].double(), own.seen[0][2].double()
    pairs = [of_format(of, basis)(0, text) for basis in (got, wanted)]
    for one, other in zip(*pairs, strict=True):
        assert ((one - other).abs() > 1e-3).double().mean() < 0.01


def expect_basis(basis: torch.Tensor, of: ops.PackedFormat, *, axes: bool) -> None:
    """A basis [pages, 2, rows, D] has orthonormal directions, which may have to be the axes."""
    directions = basis[:, :, 1:].double()
    if of.kind == "planes":
        bits, steps, measures = directions.split((1, 64, 64), 2)
        assert (2 * 64 * bits.mean((1, 2, 3)) <= 8 * of.token_bytes).all()
        used = (bits.mT > 0) & (steps.norm(dim=-1, keepdim=True) > 0)
        one = (steps @ measures.mT) * used * used.mT
        torch.testing.assert_close(one, torch.diag_embed(used[..., 0].double()), atol=1e-4, rtol=0)
        directions = torch.nn.functional.normalize(steps, dim=-1)
    else:
        wanted = torch.eye(64).double().expand_as(directions)
        torch.testing.assert_close(directions @ directions.mT, wanted)
    if axes:
        ones = directions.abs().amax(-1)
        assert ((ones == 1) | (ones == 0)).all()
        assert ((directions != 0).sum(-1) <= 1).all()


def quarter_in_groups(group: int) -> ops.PackedFormat:
    return ops.PackedFormat("top-r", 128, 64, "bf16", kept=32, numbers="bf16", group=group)


@pytest.mark.parametrize(
    ("name", "page_bytes", "fewer"),
    [
        ("int8", 64 * 2 * 128 + 4 * 128 + 4 * 64, 1.9),
        ("half-int4", 64 * 2 * (128 // 8 + 128 // 4 + 2), 5),
        ("planes-3", 64 * 96 + 16, 5.2),
        ("planes-2.5", 64 * 80 + 16, 6.2),
        # The paper's quarter, with a bit for one, two or four channels.
        ("quarter-bf16", 64 * 2 * (64 + 16), 3.2),
        (quarter_in_groups(2), 64 * 2 * (64 + 8), 3.55),
        (quarter_in_groups(4), 64 * 2 * (64 + 4), 3.75),
    ],
)
def test_bytes_by_the_allocator(
    name: str | ops.PackedFormat, page_bytes: int, fewer: float
) -> None:
    half = tiny("llama", **{**SIZES, "head_dim": 128}).bfloat16()
    runner = packed_runner(half, kv_dtype=name, max_tokens=16384)
    assert runner.packed is not None
    with runner.prefill(random_tokens(1500, 1), "full"):
        stats = runner.packed.stats()
        assert stats["held"] == 24
        assert stats["held_bytes"] == 24 * runner.packed.block_pages * page_bytes
        assert 24 * 4 * runner.cache.block_bytes >= fewer * stats["held_bytes"]
    rows = {"int8": 0, "planes-3": 2 * 129, "planes-2.5": 2 * 129}.get(name, 129)
    assert stats["basis_bytes"] == runner.packed.block_pages * 2 * rows * 128 * 4
    bases = runner.packed.nbytes - runner.packed.pages.data.nbytes
    firsts = 0 if name == "int8" else 1 + 64
    assert firsts in (0, 1 + stats["firsts_most"])
    # A token of all layers and KV heads.
    assert stats["first_bytes"] == (firsts > 0) * runner.packed.block_pages * 2 * 128 * 2
    bases -= firsts * stats["first_bytes"]
    assert bases == (3 + stats["own_bases_most"]) * stats["basis_bytes"]
    assert runner.packed.pages.data.nbytes >= 8 * stats["own_bases_most"] * stats["basis_bytes"]


@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
@pytest.mark.parametrize("megabytes", [1, 3, 20])
def test_both_pools_and_the_bases_are_within_their_bytes(name: str, megabytes: int) -> None:
    model = tiny("llama", head_dim=16, num_hidden_layers=2)
    given = {"arena_bytes": megabytes << 20, "max_tokens": None, "kv_dtype": name}
    runner = packed_runner(model, **given, chunk_tokens=100)
    total = runner._decoder.pages.nbytes + runner.packed.nbytes
    assert 0.9 * given["arena_bytes"] < total <= given["arena_bytes"]


# ---- bad input ------------------------------------------------------------------------------


def test_what_is_no_packing_is_refused(model: Any) -> None:
    for basis in (np.zeros(3), 1.0, "own"):
        with pytest.raises(InvalidArgument, match="basis: expected a tensor or None, got"):
            Packing("half-int4", basis)  # type: ignore[arg-type]
    packing, _ = random_packing("half-int4", pages_of(model), 64)
    assert packing.basis is not None
    spoiled = packing.basis.clone()
    spoiled[1, 0, 3, 5] = torch.nan
    for basis in (spoiled, packing.basis[:2], packing.basis[..., :32]):
        with pytest.raises(InvalidArgument, match="basis: expected finite numbers .4, 2, 65, 64."):
            packed_runner(model, kv_dtype=Packing("half-int4", basis))
    with pytest.raises(InvalidArgument, match="basis: expected None beside kv_dtype='int4'"):
        packed_runner(model, kv_dtype=Packing("int4", packing.basis))
    with pytest.raises(InvalidArgument, match="kv_dtype: expected None or one of int4, .* got"):
        Packing("int5")
    with pytest.raises(InvalidArgument, match="copy_bytes"):
        Packing("half-int4", copy_bytes=-1)
    planes, _ = random_packing("planes-3", pages_of(model), 64)
    assert planes.basis is not None
    for bits, said in ((3.0, "got others"), (8.0, "in 48 bytes, got 128 bytes")):
        wrong = planes.basis.clone()
        wrong[1, :, 1] = bits
        with pytest.raises(InvalidArgument, match=f"bits of a basis: expected .* {said}"):
            packed_runner(model, kv_dtype=Packing("planes-3", wrong))
    with pytest.raises(InvalidArgument, match="basis: expected finite numbers .4, 2, 130, 64."):
        packed_runner(model, kv_dtype=Packing("planes-3", packing.basis))


@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
def test_nan_reaches_its_own_request_alone(name: str) -> None:
    broken = tiny("llama", **SIZES)
    broken.get_input_embeddings().weight.data[7] = torch.nan
    good = random_tokens(600, 9)
    good[good == 7] = 8
    bad = good.copy()
    bad[100] = 7
    runner = packed_runner(broken, kv_dtype=name, chunk_tokens=200)
    assert runner.packed is not None
    with runner.prefill(bad, "full", remember=False) as spoiled:
        assert spoiled.logits.isnan().all()
    assert runner.packed.bases is not None
    assert runner.packed.bases.bases.data.isfinite().all()
    with runner.prefill(good, "full", remember=False) as done:
        assert done.logits.isfinite().all()
    assert nothing_is_held(runner)
