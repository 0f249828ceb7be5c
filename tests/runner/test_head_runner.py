"""The runner with a head map: against transformers' own forward under a mask for every head."""

from __future__ import annotations

import pytest
import torch

import kvweave
from cached_prompts import knowledge, logits_of
from families import FAMILIES, random_tokens, tiny
from head_maps import (
    classes_of,
    head_map,
    masked_greedy,
    masked_reference,
    near,
    runner_of,
)
from kvweave.cache import HeadClassMap
from kvweave.policies import Epic
from kvweave.runner import Runner
from kvweave.runner.kv.request_kv import RequestKv
from plan_policies import Restoring

TOKENS = 150


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


# ---- what a map means ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding"])
def test_a_map_of_full_heads_changes_no_bit(name) -> None:
    model, tokens = tiny(name), random_tokens(TOKENS, 1)
    plain = runner_of(model)
    full = HeadClassMap.full(plain.cache.shape, plain.spec.fingerprint)
    mapped = Runner(model, heads=full, max_tokens=2048, progress=False, check=False)
    said = []
    for runner in (plain, mapped):
        with runner.prefill(tokens, "full", logits_from=0) as done:
            logits, report = done.logits.clone(), done.report
        answer = runner.generate(tokens, "full", max_new_tokens=20, stop=(), remember=False)
        said.append((logits, answer.tokens, report))
    assert torch.equal(said[0][0], said[1][0])
    assert said[0][1] == said[1][1]
    for field in ("flops", "kv_bytes", "shared_kv_bytes", "device_bytes", "rows_per_layer"):
        assert getattr(said[0][2], field) == getattr(said[1][2], field)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return tiny(request.param)


def test_local_heads_are_the_models_own_under_a_mask(family) -> None:
    classes, tokens = classes_of(family), random_tokens(TOKENS, 2)
    runner = runner_of(family, classes)
    with runner.prefill(tokens, "full", logits_from=0, remember=False) as done:
        near(done.logits, masked_reference(family, classes, tokens))
    with runner.prefill(tokens, "full", logits_from=100, remember=False) as done:
        near(done.logits, masked_reference(family, classes, tokens)[100:])


@pytest.mark.parametrize(
    "name", ["llama", "llama-dynamic", "qwen2-sliding", "qwen3-moe", "gemma2", "smollm3"]
)
@pytest.mark.parametrize("length", [5, TOKENS])
def test_decoding_with_local_heads_is_the_models_own_under_a_mask(name, length) -> None:
    model = tiny(name)
    classes, tokens = classes_of(model), random_tokens(length, 3)
    runner = runner_of(model, classes)
    made = runner.generate(tokens, "full", max_new_tokens=20, stop=())
    assert made.tokens == masked_greedy(model, classes, tokens, 20)
    runner.cache.check()
    assert runner.cache.stats()["held"] == 0


def test_heads_may_all_be_local(llama) -> None:
    classes, tokens = classes_of(llama, [(16, 4)]), random_tokens(TOKENS, 4)
    runner = runner_of(llama, classes)
    with runner.prefill(tokens, "full", logits_from=0) as done:
        near(done.logits, masked_reference(llama, classes, tokens))
    made = runner.generate(tokens, "prefix", max_new_tokens=20, stop=())
    assert made.report.reused_prefix > 100
    assert made.tokens == masked_greedy(llama, classes, tokens, 20)


def test_a_batch_of_local_heads_is_each_alone(llama) -> None:
    runner = runner_of(llama, classes_of(llama))
    prompts = [random_tokens(n, n) for n in (5, 60, TOKENS)]
    alone = [runner.generate(p, "full", max_new_tokens=24, stop=()).tokens for p in prompts]
    batch = runner.generate_batch(prompts, "full", max_new_tokens=24, stop=())
    assert [made.tokens for made in batch] == alone


def test_flops_of_local_heads_are_of_what_they_see(llama) -> None:
    tokens = random_tokens(TOKENS, 5)
    spent = []
    for classes in (classes_of(llama, [None]), classes_of(llama, [(16, 4)])):
        runner = runner_of(llama, classes)
        with runner.prefill(tokens, "full", logits_from=0, remember=False) as done:
            spent.append(done.report.flops)
    full, local = spent
    seen = sum(min(i + 1, 16) + max(0, min(4, i + 1 - 16)) for i in range(TOKENS))
    assert full["attention"] == 4 * 16 * 4 * 4 * TOKENS * (TOKENS + 1) // 2
    assert local["attention"] == 4 * 16 * 4 * 4 * seen
    assert {k: v for k, v in full.items() if k != "attention"} == {
        k: v for k, v in local.items() if k != "attention"
    }


# ---- memory ---------------------------------------------------------------------------------


def held_pages(runner: Runner) -> list[int]:
    return [group["held"] * group["block_pages"] for group in runner.cache.stats()["groups"]]


def test_windows_hold_what_the_next_token_sees(llama) -> None:
    classes = classes_of(llama)
    runner, tokens = runner_of(llama, classes), random_tokens(1000, 6)
    with runner.prefill(tokens, "full", remember=False) as done:
        full, wide, narrow, restored = (g["held"] for g in runner.cache.stats()["groups"])
        assert restored == 0
        assert full == -(-1000 // 16)
        assert narrow <= 4
        assert wide <= 5
        pages = sum(held_pages(runner))
        assert done.report.kv_bytes == pages * runner.cache.shape.page_bytes
    plain = runner_of(llama)
    with plain.prefill(tokens, "full", remember=False) as done:
        assert pages * runner.cache.shape.page_bytes < 0.6 * done.report.kv_bytes


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding"])
@pytest.mark.parametrize("chunk", [1, 37, 64, 149, 400])
def test_chunks_change_no_bit(name, chunk) -> None:
    model, tokens = tiny(name), random_tokens(TOKENS, 7)
    classes = classes_of(model)
    said = []
    for settings in ({}, {"chunk_tokens": chunk}):
        runner = runner_of(model, classes, **settings)
        with runner.prefill(tokens, "full", logits_from=0, remember=False) as done:
            assert done.report.rows_per_layer == [TOKENS] * 4
            logits, flops = done.logits.clone(), done.report.flops
        answer = runner.generate(tokens, "full", max_new_tokens=12, stop=())
        said.append((logits, flops, answer.tokens))
        runner.cache.check()
    assert torch.equal(said[0][0], said[1][0])
    assert said[0][1:] == said[1][1:]


def test_chunks_of_one_group_change_no_bit(llama) -> None:
    tokens = random_tokens(TOKENS, 8)
    said = []
    for runner in (runner_of(llama), runner_of(llama, chunk_tokens=40)):
        with runner.prefill(tokens, "full", logits_from=60) as done:
            said.append(done.logits.clone())
    assert torch.equal(*said)


@pytest.mark.parametrize("remember", [False, True])
def test_windows_move_on_between_chunks(llama, monkeypatch, remember) -> None:
    runner = runner_of(llama, classes_of(llama), chunk_tokens=64)
    tokens, seen = random_tokens(1000, 9), []
    advance = RequestKv.advance

    def watched(kv: RequestKv, start: int, end: int) -> None:
        advance(kv, start, end)
        seen.append([group["held"] for group in runner.cache.stats()["groups"]])
        runner.cache.check()

    monkeypatch.setattr(RequestKv, "advance", watched)
    with runner.prefill(tokens, "full", remember=remember):
        assert len(seen) == 16
    full, wide, narrow, _ = zip(*seen, strict=True)
    assert set(full) == {-(-1000 // 16)}
    assert max(narrow) <= (16 + 4 + 64) // 16 + 3
    assert max(wide) <= (40 + 64) // 16 + 3


def test_what_windows_give_up_serves_others(llama) -> None:
    """Two prompts fit in chunks where one does not fit whole."""
    classes = classes_of(llama, [None, (16, 4), (16, 4), (16, 4)])
    tokens = [random_tokens(480, seed) for seed in (10, 11)]
    settings = {"max_tokens": 480}
    whole = runner_of(llama, classes, **settings)
    with whole.prefill(tokens[0], "full"), pytest.raises(kvweave.PoolFull):
        whole.prefill(tokens[1], "full")
    runner = runner_of(llama, classes, chunk_tokens=48, **settings)
    with runner.prefill(tokens[0], "full") as first, runner.prefill(tokens[1], "full") as second:
        for done, ids in ((first, tokens[0]), (second, tokens[1])):
            near(done.logits[0], masked_reference(llama, classes, ids)[-1])
    runner.cache.check()


def test_a_policy_that_measures_takes_the_prompt_whole(llama) -> None:
    runner = runner_of(llama, classes_of(llama), chunk_tokens=32)
    policy = Restoring()
    with runner.prefill(random_tokens(TOKENS, 12), policy, logits_from=0) as done:
        assert len(policy.seen) == 4
        assert len(done.logits) == TOKENS


# ---- reuse ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 24])
@pytest.mark.parametrize("shared", [16, 64, 80, 144])
def test_a_prefix_hit_with_windows_changes_no_bit(llama, shared, chunk) -> None:
    runner = runner_of(llama, classes_of(llama), chunk_tokens=chunk)
    tokens, first = random_tokens(TOKENS, 13), random_tokens(TOKENS, 14)
    first[:shared] = tokens[:shared]
    with runner.prefill(tokens, "full", logits_from=shared, remember=False) as done:
        exact = done.logits.clone()
    runner.prefill(first, "prefix", namespace="p").release()
    with runner.prefill(tokens, "prefix", logits_from=shared, namespace="p") as done:
        assert done.report.reused_prefix == shared
        assert torch.equal(done.logits, exact)
    runner.cache.check()


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gemma3"])
def test_recomputing_every_row_is_full(name, mode) -> None:
    model = tiny(name)
    runner = runner_of(model, classes_of(model), mode=mode)
    parts = knowledge(runner, 2)
    exact, _ = logits_of(runner, parts, "full")
    got, report = logits_of(runner, parts, Epic(first=1000))
    assert report.reused_segment > 0.8 * report.tokens
    near(got, exact)
    runner.cache.check()


@pytest.mark.parametrize("chunk", [None, 40])
@pytest.mark.parametrize("policy", ["naive", "epic"])
def test_sharing_is_materialising(llama, policy, chunk) -> None:
    said = []
    for mode in ("materialise", "share"):
        runner = runner_of(llama, classes_of(llama), mode=mode, chunk_tokens=chunk)
        parts = knowledge(runner, 2)
        logits, report = logits_of(runner, parts, policy)
        assert report.mode == mode
        assert report.reused_segment > 0.8 * report.tokens
        made = runner.generate(parts, policy, max_new_tokens=16, stop=(), remember=False)
        said.append((logits, made.tokens))
        runner.cache.check()
    near(said[0][0], said[1][0])
    assert said[0][1] == said[1][1]


# ---- what must not happen -------------------------------------------------------------------


def test_a_map_of_another_model_is_refused(llama) -> None:
    spec = runner_of(llama).spec
    for classes, changes in (
        (classes_of(llama), {"model_fingerprint": "another"}),
        (classes_of(llama)[:3], {}),
        (classes_of(llama)[:, :1], {}),
    ):
        with pytest.raises(kvweave.CorruptHeadMap):
            Runner(llama, heads=head_map(spec, classes, **changes), max_tokens=256, check=False)


@pytest.mark.parametrize("chunk", [0, -3])
def test_chunks_of_no_size_are_refused(llama, chunk) -> None:
    with pytest.raises(kvweave.InvalidArgument, match="chunk_tokens: expected >= 1"):
        runner_of(llama, chunk_tokens=chunk)
