"""Heads that choose among packed pages read what the definition says; all of them is dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from document_decoding import documents, fresh, insert_all
from families import random_tokens, tiny
from kvweave import Store
from kvweave.runner import Runner
from kvweave.runner.tiers.choice import Speeds
from packed_choosing import ChoosingDecoding, expect_packed_choice
from packed_decoding import PackedDecoding, apart, nothing_is_held, packed_runner, steps_of
from page_meaning import Meaning, random_packing
from ranked_pages import FULL, kinds_map, logits_of_steps, top_k
from tiered_runners import FAST, SLOW, Stated
from versions import needs_cuda

SIZES = {"head_dim": 64, "max_position_embeddings": 4096, "num_hidden_layers": 2}
NARROW = {"kind": "window", "sink": 4, "recent": 100}
STEPS = 150
KINDS: dict[str, list[dict[str, Any]]] = {
    "every step": [top_k(4)],
    "some": [top_k(5, 16), FULL],
    "by means": [top_k(4, 3, score="mean"), top_k(6, 16)],
    "over many pages": [top_k(4, 300), NARROW, FULL],
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", **SIZES)


def runner_of(
    model: Any, name: str, kinds: list[dict[str, Any]], **settings: Any
) -> tuple[Runner, Meaning]:
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    packing, meaning = random_packing(name, 4, 64)
    heads = kinds_map(plain.spec, kinds)
    return packed_runner(model, kv_dtype=packing, heads=heads, **settings), meaning


def sights_of(kinds: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """Window and sink of each of two heads of two layers."""
    of = [(kind.get("recent", 0), kind.get("sink", 0)) for kind in kinds]
    return np.array([of[at % len(of)] for at in range(4)], np.int32).reshape(2, 2, 2)


# ---- what is said ---------------------------------------------------------------------------


@pytest.mark.parametrize("of", KINDS)
@pytest.mark.parametrize("name", ["int4", "half-int4", "planes-3"])
def test_it_is_the_definition(model: Any, name: str, of: str) -> None:
    """Against transformers' own decoding, where pages are scored by an explicit sort in f64."""
    kinds = KINDS[of]
    runner, meaning = runner_of(model, name, kinds)
    tokens = random_tokens(900, 1)
    said, logits = logits_of_steps(runner, tokens, STEPS)
    sights = sights_of(kinds)
    chosen = ChoosingDecoding(model, kinds, 16, meaning, sights)
    dense = PackedDecoding(model, 16, meaning, sights)
    wanted, others = (
        [each.prefill(tokens, 2048), *(each.step(token) for token in said[:-1])]
        for each in (chosen, dense)
    )
    assert apart(others, wanted) > 1e-3
    assert apart(logits, wanted) < 0.02 * apart(others, wanted)
    assert nothing_is_held(runner)


@pytest.mark.parametrize("name", ["int4", "int8", "half-int4", "quarter-bf16", "planes-2.5"])
def test_all_of_them_change_no_bit(model: Any, name: str) -> None:
    tokens = random_tokens(900, 2)
    for kinds in ([top_k(64, 16)], [top_k(18, 4, score="mean"), FULL], [NARROW, top_k(64, 1)]):
        plain = [FULL if kind["kind"] == "top_k" else kind for kind in kinds]
        runners = [runner_of(model, name, some)[0] for some in (kinds, plain)]
        (said, logits), (others, wanted) = (logits_of_steps(r, tokens, STEPS) for r in runners)
        assert said == others
        assert all(torch.equal(a, b) for a, b in zip(logits, wanted, strict=True))


@pytest.mark.parametrize("kinds", [[top_k(4)], [top_k(5, score="mean"), FULL]])
def test_documents_are_chosen_from_at_their_new_positions(model: Any, kinds: Any) -> None:
    runner, _ = runner_of(model, "half-int4", kinds, max_tokens=16384)
    docs = documents([300, 40, 129])
    insert_all(runner, docs)
    prompt = [fresh(70, 1), docs[0], fresh(5, 2), docs[1], docs[2], docs[0], fresh(50, 3)]
    checked = 0
    asked = {"remember": False, "watched": False, "reserve_tokens": STEPS}
    with runner.prefill(prompt, "naive", **asked) as done:
        sequence = decoding(runner, done, STEPS + 1)

        def choose(_batch: Any, logits: torch.Tensor, _greedy: bool) -> Any:
            return np.array([sequence.choose(logits[0])])

        with torch.inference_mode():
            for _ in range(STEPS):
                runner._decoder.step([sequence], choose=choose, watched=True)
                queries = runner._decoder.queries
                assert queries is not None
                checked += expect_packed_choice(runner, sequence, queries[:, 0])
        runner._decoder.forget(sequence.request)
    assert checked == STEPS * 2 * sum(kind["kind"] == "top_k" for kind in (kinds * 2)[:2])
    wide = [top_k(64, 16) if kind["kind"] == "top_k" else kind for kind in kinds]
    logits = []
    for some in (wide, [FULL]):
        other, _ = runner_of(model, "half-int4", some, max_tokens=16384)
        insert_all(other, docs)
        with other.prefill(prompt, "naive", **asked) as done:
            logits.append(steps_of(other, decoding(other, done, STEPS + 1), STEPS))
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))


def test_batches_say_what_each_says_alone(model: Any) -> None:
    """Requests that are ranked at unlike steps, and that come and go."""
    runner, _ = runner_of(model, "int4", KINDS["some"], max_tokens=1 << 15)
    prompts = [random_tokens(count, count) for count in (1, 600, 400, 777)]
    how = {"remember": False, "stop": []}
    alone = [runner.generate(p, max_new_tokens=70, **how).tokens for p in prompts]
    batch = runner.generate_batch(prompts, max_new_tokens=70, **how)
    assert [answer.tokens for answer in batch] == alone
    engine = runner.engine()
    asked = [engine.submit(prompts[0], max_new_tokens=70, **how)]
    for prompt in prompts[1:]:
        for _ in range(9):
            engine.must_step()
        asked.append(engine.submit(prompt, max_new_tokens=70, **how))
    engine.run()
    assert [request.result().tokens for request in asked] == alone
    assert nothing_is_held(runner)


def test_a_ranking_stays_for_so_many_steps(model: Any) -> None:
    runner, _ = runner_of(model, "int4", [top_k(4, 7)])
    with runner.prefill(random_tokens(700, 1), "full", reserve_tokens=30) as done:
        sequence, seen = decoding(runner, done, 31), []
        for _ in range(30):
            steps_of_one(runner, sequence)
            choice = runner._decoder._slots[-1].packed._choice
            row = choice._rows[sequence]
            seen.append(choice._ranked[row, 0] - 700)
        runner._decoder.forget()
        assert not choice._rows
    assert seen == [step // 7 * 7 for step in range(30)]


def steps_of_one(runner: Runner, sequence: Any) -> None:
    def choose(_batch: Any, logits: torch.Tensor, _greedy: bool) -> Any:
        return np.array([sequence.choose(logits[0])])

    with torch.inference_mode():
        runner._decoder.step([sequence], choose=choose)


def test_forks_choose_for_themselves(model: Any) -> None:
    runner, _ = runner_of(model, "half-int4", [top_k(4, 16)])
    tokens = random_tokens(700, 3)
    _, wanted = logits_of_steps(runner, tokens, 90)
    with runner.prefill(tokens, "full", remember=False) as done, done.fork() as fork:
        for one in (fork, done):
            logits = steps_of(runner, decoding(runner, one, 91), 90)
            assert all(torch.equal(a, b) for a, b in zip(logits, wanted[1:], strict=True))
    assert nothing_is_held(runner)


# ---- what is found, and what it takes -------------------------------------------------------


def test_what_was_said_over_a_part_is_not_found(model: Any) -> None:
    tokens = random_tokens(500, 4)
    for kinds, found in (([top_k(4)], 448), ([FULL], 640), ([top_k(64)], 640)):
        runner, _ = runner_of(model, "int4", kinds)
        said = runner.generate(tokens, max_new_tokens=150, stop=[]).tokens
        longer = np.concatenate((tokens, np.asarray(said, np.int32)))
        with runner.prefill(longer, "prefix") as done:
            assert done.report.reused_prefix == found


def test_bounds_come_with_documents_from_a_store(model: Any, tmp_path: Path) -> None:
    """Of the keys that their pages stand for, within what packing moves."""
    kinds, store = [top_k(4)], Store(tmp_path / "kv", direct=False)
    here, _ = runner_of(model, "int8", kinds)
    there, _ = runner_of(model, "int8", kinds)
    document = documents([300])[0]
    here.insert(document.tokens, "manual", store=store)
    assert [segment.name for segment in there.restore(store)] == ["manual"]
    pools = []
    for runner in (here, there):
        prompt = [fresh(70, 1), document, fresh(5, 2)]
        with runner.prefill(prompt, "naive", remember=False) as done:
            blocks = np.unique(done.kv.packed.entries()[:, 0])
            assert len(blocks) == 5
            pages = (blocks[:, None] + np.arange(4)).reshape(-1)
            pools.append(runner.packed.bounds[pages])
    assert pools[0].abs().max() > 0.1
    torch.testing.assert_close(*pools, atol=0.02, rtol=0)


def test_bounds_come_with_documents_from_the_hosts_memory(model: Any) -> None:
    """As they were, of exact keys; they count there as well."""
    given = {"max_tokens": 2048, "document_bytes": 8 << 20}
    runner, _ = runner_of(model, "int4", [top_k(4)], **given)
    runner.tiers.measured = Stated(Speeds(host=FAST, disk=FAST, compute=SLOW))
    document = documents([300])[0]
    runner.insert(document.tokens, "manual")
    runner.flush()

    def bounds(source: str) -> torch.Tensor:
        with runner.prefill([fresh(70, 1), document, fresh(5, 2)], "naive") as done:
            assert done.report.documents[1].source == source
            blocks = done.kv.packed.entries()[:, 0]
            assert len(set(blocks)) == 5
            return runner.packed.bounds[(blocks[:, None] + np.arange(4)).reshape(-1)]

    wanted = bounds("device")
    runner.packed.cache.delete("manual")
    for seed in (1, 2):
        runner.packed.cache.admit(random_tokens(2000, seed), reuse="none").release()
    runner.packed.bounds.fill_(7.0)
    assert torch.equal(bounds("host"), wanted)
    other, _ = runner_of(model, "int4", [FULL], **given)
    sizes = [each.tiers.host.stats()["block_bytes"] for each in (runner, other)]
    assert sizes[0] - sizes[1] == 4 * 3 * 64 * 4


def test_bounds_are_within_the_bytes_of_the_arena(model: Any) -> None:
    given = {"arena_bytes": 8 << 20, "max_tokens": None}
    sizes = []
    for kinds in ([FULL], [top_k(4)]):
        runner, _ = runner_of(model, "int4", kinds, **given)
        total = runner._decoder.pages.nbytes + runner.packed.nbytes
        assert 0.9 * given["arena_bytes"] < total <= given["arena_bytes"]
        sizes.append(len(runner.packed.pages.data))
    assert runner.packed.bounds.nbytes == sizes[1] * 3 * 64 * 4
    assert sizes[1] < sizes[0]


@needs_cuda
@pytest.mark.parametrize("of", KINDS)
@pytest.mark.parametrize("name", ["int4", "half-int4", "planes-3"])
def test_on_a_gpu_it_says_what_the_cpu_says(name: str, of: str) -> None:
    model = tiny("llama", **SIZES).bfloat16()
    tokens = random_tokens(900, 1)
    runner, _ = runner_of(model, name, KINDS[of])
    said, wanted = logits_of_steps(runner, tokens, STEPS)
    device, _ = runner_of(tiny("llama", **SIZES).bfloat16().to("cuda"), name, KINDS[of])
    with device.prefill(tokens, "full", remember=False, reserve_tokens=STEPS) as done:
        logits = steps_of(device, decoding(device, done, STEPS + 1), STEPS, said[1:])
    near = [float((a.cpu() - b).abs().max()) for a, b in zip(logits, wanted[1:], strict=True)]
    # A page of two that score alike may be another one there.
    assert np.median(near) < 0.05
