"""One runner prefills into packed pages, another decodes: the bits of one that does both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from document_decoding import documents, fresh, insert_all
from families import random_tokens, tiny
from head_maps import class_map
from kvweave import InvalidArgument, NamespaceConflict, PoolFull
from kvweave.payload import KvPayload, freeze_kv, import_kv
from kvweave.runner import Runner
from kvweave.runner.hand_off import take_over
from kvweave.runner.kv.pool_bases import REFINED
from kvweave.runner.prefill.prefilled import Prefill
from packed_decoding import nothing_is_held, packed_runner, steps_of
from page_meaning import random_packing
from ranked_pages import FULL, WINDOW, kinds_map, top_k
from versions import needs_cuda

SIZES = {"head_dim": 64, "max_position_embeddings": 16384, "num_hidden_layers": 2}
FORMATS = ["int4", "int8", "half-int4", "quarter-bf16", "planes-3", "planes-2.5", "truncated fp8"]
SIGHTS = np.array([[[100, 20], [0, 0]], [[0, 0], [0, 0]]], np.int32)
LOCAL = np.array([[[128, 64], [16, 0]], [[90, 0], [17, 1]]], np.int32)
STEPS = 200
"""Enough to fill three pages, and to have what was prefilled last read packed."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", **SIZES)


def runner_of(model: Any, kv_dtype: Any, sights: Any = None, **more: Any) -> Runner:
    heads = None
    if sights is not None:
        plain = Runner(model, max_tokens=64, check=False, progress=False)
        heads = class_map(sights, plain.spec.fingerprint)
    given = {"max_tokens": 4096, "kv_dtype": kv_dtype, "heads": heads, **more}
    return packed_runner(model, **given)


def said_by(runner: Runner, done: Prefill, steps: int = STEPS) -> list[torch.Tensor]:
    """The logits of a prompt and of the steps behind it."""
    sequence = decoding(runner, done, steps + 1)
    return [done.logits[-1].float().clone(), *steps_of(runner, sequence, steps)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def resumed(runner: Runner, payload: KvPayload, steps: int = STEPS) -> Iterator[Prefill]:
    with take_over(runner._prefiller, payload, None, steps) as done:
        yield done


def handed_over(
    runner: Runner, prompt: Any, policy: str = "full", **more: Any
) -> tuple[KvPayload, list[torch.Tensor], Any]:
    """A prompt's payload as it comes from its bytes, what is said here, and the report."""
    asked = {"reserve_tokens": STEPS, "remember": False, "watched": False, **more}
    with runner.prefill(prompt, policy, **asked) as done:
        payload = KvPayload.from_bytes(runner.export(done).to_bytes())
        return payload, said_by(runner, done), done.report


# ---- what is said ---------------------------------------------------------------------------


@pytest.mark.parametrize("sights", [None, SIGHTS, LOCAL], ids=["all", "some", "windows"])
@pytest.mark.parametrize("name", FORMATS)
def test_decoding_goes_on_elsewhere(model: Any, name: str, sights: Any) -> None:
    packing, _ = random_packing(name, 4, 64)
    here, there = (runner_of(model, packing, sights, chunk_tokens=n) for n in (150, 2048))
    for tokens in (1, 63, 64, 129, 700):
        payload, wanted, report = handed_over(here, random_tokens(tokens, tokens))
        # The same bytes again leave no more and say no less than the first time.
        for steps in (STEPS, 9):
            with resumed(there, payload) as done:
                assert done.report.kv_bytes == report.kv_bytes
                assert same(said_by(there, done, steps), wanted[: steps + 1])
            assert nothing_is_held(there)
    assert nothing_is_held(here)


@pytest.mark.parametrize("name", ["int4", "half-int4"])
def test_answers_are_the_same_tokens(model: Any, name: str) -> None:
    here, there = (runner_of(model, name, max_tokens=16384) for _ in range(2))
    prompt, asked = random_tokens(900, 1), {"max_new_tokens": 90, "stop": ()}
    alone = here.generate(prompt, "full", remember=False, **asked)
    with here.prefill(prompt, "full", remember=False) as done:
        payload = here.export(done)
        assert here.export(done).to_bytes() == payload.to_bytes()
        assert here.decode(done, **asked).tokens == alone.tokens
    went_on = there.resume(payload, **asked)
    assert went_on.tokens == alone.tokens
    assert went_on.report.policy == "payload"
    assert nothing_is_held(there)
    # A payload brings nothing that others find.
    regime = payload.header.regime
    assert there.packed.cache.match_prefix(prompt, regime=regime) == 0
    assert there.cache.match_prefix(prompt, regime=regime) == 0


@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
def test_a_basis_that_the_sender_made_of_its_text_goes_along(model: Any, name: str) -> None:
    """Pages of all bases that it made, and those to come in what is its shared one by now."""
    here, there = (runner_of(model, name, chunk_tokens=300, max_tokens=65536) for _ in range(2))
    # The receiver has one of its own, made of another text.
    there.generate(random_tokens(800, 9), "full", max_new_tokens=1)
    assert here.packed.bases.wants_moments
    payload, wanted, _ = handed_over(here, random_tokens(1030, 2))
    assert here.packed.bases.shared == REFINED
    assert payload.header.packed.bases == (3 if name == "planes-3" else 2)
    with resumed(there, payload) as done:
        assert there.packed.stats()["own_bases"] == payload.header.packed.bases
        assert same(said_by(there, done), wanted)
        pages = done.kv.packed.request.entries()[:, 0]
        assert done.kv.packed.basis in there.packed.bases.numbers(pages)
    # Whoever has gone needs none: so may as many come as want.
    assert there.packed.stats()["own_bases"] == 0
    with resumed(there, payload) as one, resumed(there, payload) as other:
        assert there.packed.stats()["own_bases"] == payload.header.packed.bases
        one.release()
        assert same(said_by(there, other), wanted)


@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
def test_shared_bases_that_the_receiver_has_need_no_room(model: Any, name: str) -> None:
    """Both, also where none of its own pages is packed in the first."""
    here, there = (runner_of(model, name, chunk_tokens=300, max_tokens=65536) for _ in range(2))
    text = random_tokens(2030, 2)
    payload, wanted, _ = handed_over(here, text)
    there.prefill(text, "full", remember=False).release()
    # Of planes that rotate nothing the steps are of each runner's own first tokens.
    own = 1 if name == "planes-3" else 0
    with resumed(there, payload) as done:
        assert there.packed.stats()["own_bases"] == own
        assert same(said_by(there, done), wanted)
    assert there.packed.stats()["own_bases"] == 0
    assert nothing_is_held(there)


@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
def test_a_fork_keeps_the_bases_of_what_it_reads(model: Any, name: str) -> None:
    here, there = (runner_of(model, name, max_tokens=65536) for _ in range(2))
    payload, wanted, _ = handed_over(here, random_tokens(700, 2))
    with resumed(there, payload) as done:
        fork = done.fork()
    with fork:
        assert there.packed.stats()["own_bases"] == payload.header.packed.bases
        assert same(said_by(there, fork), wanted)
    assert there.packed.stats()["own_bases"] == 0
    assert nothing_is_held(there)


@pytest.mark.parametrize(
    ("policy", "name", "sights"),
    [
        ("naive", "int4", None),
        ("naive", "planes-3", SIGHTS),
        ("foresight", "half-int4", None),
        ("epic", "int8", SIGHTS),
        ("cacheblend", "int4", None),
    ],
)
def test_documents_are_handed_over_as_they_lie(
    model: Any, policy: str, name: str, sights: Any
) -> None:
    """At other positions than they were packed at, one of them twice; others aside between them."""
    packing, _ = random_packing(name, 4, 64)
    here, there = (runner_of(model, packing, sights, max_tokens=16384) for _ in range(2))
    docs = documents([300, 40, 129])
    insert_all(here, docs)
    prompt = [fresh(70, 1), docs[0], fresh(5, 2), docs[1], docs[2], docs[0], fresh(50, 3)]
    payload, wanted, report = handed_over(here, prompt, policy)
    assert report.reused_segment > 500
    packed = payload.header.packed
    assert packed.tokens == payload.header.tokens
    assert packed.aside_tokens > 50
    # Those of the document that comes twice come once.
    assert packed.blocks <= 9
    with resumed(there, payload) as done:
        # Tokens aside lie in the slots that they had: a GPU may sum in their order.
        rows = payload.parts["packed.aside_entries"].numpy()
        assert np.array_equal(done.kv.packed.exact_entries(64)[:, 1:], rows[:, 1:])
        assert same(said_by(there, done), wanted)
        longer = random_tokens(9, 4)
        behind = there.extend(done, longer.tolist())
    with here.prefill(prompt, policy, remember=False, reserve_tokens=STEPS + 10) as done:
        said_by(here, done)
        assert torch.equal(here.extend(done, longer.tolist()), behind)
    assert nothing_is_held(there)


def test_a_document_in_a_basis_of_its_own(model: Any) -> None:
    here, there = (runner_of(model, "half-int4", max_tokens=32768) for _ in range(2))
    long, short = documents([5600, 100])
    insert_all(here, [long, short])
    here.flush()
    assert here.packed.stats()["own_bases"] == 1
    payload, wanted, _ = handed_over(here, [fresh(70, 1), long, short, fresh(9, 2)], "naive")
    assert payload.header.packed.bases == 2
    with resumed(there, payload) as done:
        assert same(said_by(there, done), wanted)
        assert done.report.shared_kv_bytes == 2 * there.packed.bases.basis_bytes
    assert nothing_is_held(there)


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (32, 8)])
def test_exact_pages_may_be_of_another_size(model: Any, sizes: tuple[int, int]) -> None:
    here, there = (runner_of(model, "int4", page_tokens=n, max_tokens=8192) for n in sizes)
    docs = documents([300, 129])
    insert_all(here, docs)
    parts = [fresh(70, 1), docs[0], fresh(5, 2), docs[1], fresh(50, 3)]
    for prompt, policy in ((random_tokens(500, 1), "full"), (parts, "naive")):
        payload, wanted, _ = handed_over(here, prompt, policy)
        with resumed(there, payload) as done:
            assert same(said_by(there, done), wanted)
    assert nothing_is_held(there)


def test_a_batch_of_payloads_says_what_each_says(model: Any) -> None:
    """Also beside a prompt that was prefilled there: the bits of the same batch of one runner."""
    packing, _ = random_packing("half-int4", 4, 64)
    here, there = (runner_of(model, packing, max_tokens=16384) for _ in range(2))
    asked = {"remember": False, "reserve_tokens": STEPS}
    prompts = [random_tokens(n, n) for n in (150, 700, 300)]
    with ExitStack() as held:
        ours = [held.enter_context(here.prefill(prompt, "full", **asked)) for prompt in prompts]
        sent = [KvPayload.from_bytes(here.export(done).to_bytes()) for done in ours[:2]]
        theirs = [held.enter_context(resumed(there, payload)) for payload in sent]
        theirs.append(held.enter_context(there.prefill(prompts[2], "full", **asked)))
        assert same(said_by_all(there, theirs), said_by_all(here, ours))
    assert nothing_is_held(there)


def said_by_all(runner: Runner, some: list[Prefill]) -> list[torch.Tensor]:
    """The logits [B, V] of the steps of a batch."""
    batch, seen = [decoding(runner, done, STEPS + 1) for done in some], list[torch.Tensor]()

    def choose(_batch: Any, logits: torch.Tensor, _greedy: bool) -> Any:
        seen.append(logits.float().clone())
        return np.array([s.choose(row) for s, row in zip(batch, logits, strict=True)])

    with torch.inference_mode():
        for _ in range(STEPS):
            runner._decoder.step(batch, choose=choose)
    runner._decoder.forget()
    return seen


@pytest.mark.parametrize("kinds", [[top_k(4, 3)], [top_k(5, 16, score="mean"), WINDOW, top_k(6)]])
@pytest.mark.parametrize("name", ["int4", "half-int4"])
def test_heads_choose_there_what_they_choose_here(model: Any, name: str, kinds: Any) -> None:
    """By the bounds of exact keys that come along."""
    packing, _ = random_packing(name, 4, 64)
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    maps = [kinds_map(plain.spec, of) for of in (kinds, kinds, [FULL], [top_k(7, 3)])]
    here, there, *others = (runner_of(model, packing, heads=of, max_tokens=16384) for of in maps)
    docs = documents([300, 40, 129])
    insert_all(here, docs)
    parts = [fresh(70, 1), docs[0], fresh(5, 2), docs[1], docs[2], docs[0], fresh(50, 3)]
    for prompt, policy in ((random_tokens(900, 1), "full"), (parts, "naive")):
        payload, wanted, _ = handed_over(here, prompt, policy)
        choosing = 4 if len(kinds) == 1 else 3
        assert payload.parts["packed.bounds"].shape[1:] == (choosing, 3, 64)
        with resumed(there, payload) as done:
            assert same(said_by(there, done), wanted)
        for other in others:
            with pytest.raises(InvalidArgument, match="payload head map"):
                other.resume(payload)
            assert nothing_is_held(other)
    assert nothing_is_held(there)


# ---- what travels ---------------------------------------------------------------------------


def test_what_travels_is_what_is_read(model: Any) -> None:
    """Packed pages of heads that read all, behind the sink; of exact ones the windows."""
    for sights, heads in ((None, 4), (SIGHTS, 3), (LOCAL, 0)):
        runner = runner_of(model, "int4", sights)
        payload, _, _ = handed_over(runner, random_tokens(1000, 1))
        page = runner.packed.pages.format.page_bytes
        sizes = payload.sizes()
        assert payload.parts["packed.pages"].shape == (14, heads, page)
        assert sizes.parts["packed.pages"] == 14 * heads * page
        assert payload.header.groups[0].spans == ((0, 64), (864, 1000))
        assert sizes.parts["group.0"] == 4 * 2 * 200 * 64 * 4
        assert sizes.total < sizes.dense / 2


def test_nothing_of_others_is_left_in_what_did_not_travel(model: Any) -> None:
    """Pages of heads with windows hold nothing where the payload's lie."""
    here, there = (runner_of(model, "int4", SIGHTS) for _ in range(2))
    there.packed.pages.data.fill_(77)
    payload, _, _ = handed_over(here, random_tokens(700, 1))
    with resumed(there, payload) as done:
        blocks = done.kv.packed.entries()[:, 0]
        pages = there.packed.pages.data[blocks[:, None] + np.arange(4)]
        assert not pages[:, 0].any()
        assert (pages[:, 1:] != 77).any()


# ---- what is refused ------------------------------------------------------------------------


def test_payloads_of_others_are_refused(model: Any) -> None:
    here, there = (runner_of(model, "int4") for _ in range(2))
    payload, _, _ = handed_over(here, random_tokens(300, 3), namespace="a")
    exact = Runner(model, max_tokens=2048, progress=False, check=False)
    with exact.prefill(random_tokens(300, 3), "full") as done:
        all_exact = exact.export(done)

    def changed(**fields: Any) -> KvPayload:
        return KvPayload(replace(payload.header, **fields), payload.parts)

    refused = [
        (there, changed(fingerprint="other"), "payload fingerprint: expected .* got other"),
        (there, changed(regime=1), "payload regime"),
        (there, all_exact, "payload format: expected int4/64/bf16, got exact pages alone"),
        (exact, payload, "payload format: expected exact pages alone, got int4/64/bf16 beside"),
        (runner_of(model, "int8"), payload, "format: expected int8/64/bf16, got int4/64/bf16"),
        (runner_of(model, "half-int4"), payload, "format: expected top-r/64/bf16/32/1/64/int4,"),
        (runner_of(model, "int4", SIGHTS), payload, "payload head map"),
    ]
    for runner, wrong, says in refused:
        with pytest.raises(InvalidArgument, match=says):
            runner.resume(wrong)
        assert runner.cache.stats()["held"] == 0
    with pytest.raises(NamespaceConflict):
        there.resume(payload, namespace="b")
    with pytest.raises(InvalidArgument, match="format: expected exact pages alone"):
        import_kv(exact.cache, exact._decoder.pages, payload)
    with pytest.raises(InvalidArgument, match="format: expected exact pages alone"):
        freeze_kv(exact.cache, exact._decoder.pages, payload, "name", "a")
    assert nothing_is_held(there)


def test_what_finds_no_room_takes_nothing(model: Any) -> None:
    here = runner_of(model, "half-int4", max_tokens=16384)
    docs = documents([300, 129])
    insert_all(here, docs)
    payload, _, _ = handed_over(here, random_tokens(900, 3))
    parts = [fresh(70, 1), docs[0], fresh(900, 2), docs[1], fresh(50, 3)]
    of_documents, _, _ = handed_over(here, parts, "naive")
    small = runner_of(model, "half-int4", max_tokens=600)
    with pytest.raises(PoolFull):
        small.resume(payload, max_new_tokens=2)
    assert nothing_is_held(small)
    # There is room for its pages, but none for a basis.
    narrow = runner_of(model, "half-int4", max_tokens=4096)
    assert narrow.packed.stats()["own_bases_most"] == 0
    with pytest.raises(PoolFull, match="bases: expected room for one more, got 0"):
        narrow.resume(payload, max_new_tokens=2)
    assert nothing_is_held(narrow)
    # The exact pool has room for windows, and none for what lies aside.
    aside = runner_of(model, "half-int4", max_tokens=12000, chunk_tokens=64)
    with pytest.raises(PoolFull):
        aside.resume(of_documents, max_new_tokens=2)
    assert nothing_is_held(aside)
    for runner in (small, narrow, aside):
        runner.generate(random_tokens(200, 1), max_new_tokens=2)


@needs_cuda
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "int8"])
@pytest.mark.parametrize("sights", [None, SIGHTS])
def test_between_gpus_and_hosts(name: str, sights: Any) -> None:
    model = tiny("llama", **SIZES).bfloat16().to("cuda")
    packing, _ = random_packing(name, 4, 64)
    here, there = (runner_of(model, packing, sights, max_tokens=16384) for _ in range(2))
    docs = documents([300, 129])
    insert_all(here, docs)
    parts = [fresh(70, 1), docs[0], fresh(5, 2), docs[1], fresh(50, 3)]
    asked: dict[str, Any] = {"reserve_tokens": STEPS, "remember": False, "watched": False}
    for prompt, policy in ((random_tokens(700, 1), "full"), (parts, "naive")):
        with here.prefill(prompt, policy, **asked) as done:
            payload = here.export(done)
            wanted = said_by(here, done)
        assert payload.parts["packed.pages"].is_cuda
        for sent in (payload, KvPayload.from_bytes(payload.to_bytes())):
            with resumed(there, sent) as done:
                assert same(said_by(there, done), wanted)
    assert nothing_is_held(there)
