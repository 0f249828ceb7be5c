"""Documents that have left the device: found in the host's memory or a store, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import random_tokens, tiny
from kvweave import ForeignStore, InvalidArgument, Runner, Segment, Store
from kvweave.runner.tiers.choice import Speeds
from tiered_runners import FAST, SLOW, Stated, answer, evict, prompt_of, sources, tiered
from versions import needs_cuda

LETTER, MANUAL = random_tokens(90, 5).tolist(), random_tokens(70, 8).tolist()
BYTES = 1 << 22
BLOCK = 4 * 2 * 16 * 16 * 2 * 4
"""Bytes of a block of the tiny models: layers, heads, tokens, dims, K and V, f32."""


def written(folder: Path, model: Any, *documents: list[int], local: int = 0) -> Any:
    """What a runner says that has the documents frozen, and has stored them."""
    runner = tiered(model, local, store=folder)
    for number, document in enumerate(documents):
        runner.insert(document, f"document {number}")
    runner.close()
    assert runner.tiers.stats()["written"] == len(documents)
    return answer(runner, *documents)


def kept_kv(runner: Runner, document: list[int]) -> torch.Tensor:
    """K and V of a document on the device, as the prompt that goes on from it reads them."""
    with runner.prefill([*document, 1], "prefix", remember=False) as done:
        assert done.report.reused_prefix == len(document)
        return runner.export(done).parts["group.0"][:, :, : len(document)].clone()


@pytest.mark.parametrize("local", [0, 1])
@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "qwen3"])
def test_a_new_runner_finds_marked_documents(
    tmp_path: Path, family: str, mode: str, local: int
) -> None:
    model = tiny(family)
    said = written(tmp_path, model, LETTER, MANUAL, local=local)
    other = tiered(model, local, mode=mode, store=Store(tmp_path), document_bytes=BYTES)
    again = answer(other, LETTER, MANUAL)
    assert again.tokens == said.tokens
    assert sources(again) == ["disk", "disk"]
    assert again.report.reused_segment == said.report.reused_segment > 100
    assert again.report.timings.load_s > 0
    # Now they are on the device; once that has evicted them, in the host's memory.
    assert sources(answer(other, MANUAL, LETTER)) == ["device", "device"]
    evict(other)
    third = answer(other, LETTER, MANUAL)
    assert (third.tokens, sources(third)) == (said.tokens, ["host", "host"])
    assert other.cache.stats()["held"] == other.tiers.host.cache.stats()["held"] == 0
    other.cache.check()
    other.tiers.host.cache.check()


@pytest.mark.parametrize("length", [16, 17, 31, 32, 90])
def test_what_comes_back_is_the_same_bit_for_bit(tmp_path: Path, length: int) -> None:
    model, document = tiny("llama").to(torch.bfloat16), random_tokens(length, 3).tolist()
    first = tiered(model, store=tmp_path)
    first.insert(document, "document")
    first.flush()
    computed = kept_kv(first, document)
    other = tiered(model, store=tmp_path, document_bytes=BYTES)
    done = other.prefill(prompt_of(document), "naive", remember=False)
    assert [one.source for one in done.report.documents][1] == "disk"
    assert torch.equal(kept_kv(other, document), computed)
    done.release()
    evict(other)
    done = other.prefill(prompt_of(document), "naive", remember=False)
    assert [one.source for one in done.report.documents][1] == "host"
    assert torch.equal(kept_kv(other, document), computed)
    done.release()


def test_a_store_is_told_what_documents_took(tmp_path: Path) -> None:
    """FLOPs as a prefill of the text alone counts them; the order of eviction goes by them."""
    model = tiny("llama")
    runner, named = tiered(model, store=tmp_path / "own"), Store(tmp_path / "named")
    runner.insert(LETTER, "letter")
    runner.insert(MANUAL, "manual", store=named)
    runner.flush()
    found = {one.tokens: one.cost for one in [*Store(tmp_path / "own").list(), *named.list()]}
    assert found.keys() == {len(LETTER), len(MANUAL)}
    for text in (LETTER, MANUAL):
        done = tiered(model).prefill(text, "full", logits_from=0, watched=False)
        flops = done.report.flops
        assert found[len(text)] == sum(flops.values()) - flops["logits"] > 0


@pytest.mark.long
def test_a_restarted_process_says_the_same(tmp_path: Path, smollm2: Any) -> None:
    """Real weights and the default policy; the first process is killed once it has flushed."""
    code = """
import os, sys
from kvweave import Runner
from kvweave.models import load_smollm2
import torch
runner = Runner(*load_smollm2(torch.float32), max_tokens=1024, check=False, store=sys.argv[1])
runner.insert(sys.argv[2], "manual", "tenant")
runner.flush()
print("kept", flush=True)
os.kill(os.getpid(), 9)
"""
    manual = "The pump must be primed with two litres of clean water before its first start. " * 4
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), manual], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "kept\n"), done.stderr
    asked = [Segment(text=manual, namespace="tenant"), "\nWhat must be done first?\n"]
    asked.insert(0, "Read this.\n")
    said = []
    for store in (None, os.fspath(tmp_path)):
        runner = tiered(smollm2[0], tokenizer=smollm2[1], store=store)
        if store is None:
            runner.insert(manual, "manual", "tenant")
        said.append(runner.generate(asked, max_new_tokens=8, stop=(), namespace="tenant"))
    assert said[1].tokens == said[0].tokens
    assert said[1].report.recomputed == said[0].report.recomputed
    assert [one.source for one in said[1].report.documents] == ["disk"]


def test_what_is_inserted_again_is_brought_and_not_computed(tmp_path: Path) -> None:
    model = tiny("llama")
    written(tmp_path, model, LETTER)
    other = tiered(model, store=tmp_path, document_bytes=BYTES)
    prefill, other._prefiller.prefill = other._prefiller.prefill, None
    other.insert(LETTER, "again")
    other._prefiller.prefill = prefill
    other.flush()
    names = [name for _, name, _ in Store(tmp_path).documents()]
    assert names == ["again", "document 0"]
    assert len(Store(tmp_path).list()) == 1
    # What is deleted is forgotten by name; a name that is given again means the new text.
    other.delete("again")
    other.insert(MANUAL, "document 0")
    other.flush()
    third = tiered(model, store=tmp_path)
    assert [entry.tokens for entry in third.restore()] == [len(MANUAL)]


@pytest.mark.parametrize("local", [0, 1])
def test_frozen_documents_that_give_way_come_back_and_are_pinned_again(local: int) -> None:
    runner = tiered(tiny("llama"), local, max_tokens=400, document_bytes=BYTES)
    runner.insert(LETTER, "letter")
    said = answer(runner, LETTER)
    assert sources(said) == ["device"]
    with runner.prefill(random_tokens(390, 3).tolist(), "full", remember=False):
        assert runner.segments()[0].resident_blocks == 0
    again = answer(runner, LETTER)
    assert (again.tokens, sources(again)) == (said.tokens, ["host"])
    assert runner.segments()[0].resident_blocks == 6


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "insert", "evict"]), st.sets(st.integers(0, 3), max_size=2)
        ),
        min_size=4,
        max_size=12,
    )
)
def test_whatever_happens_answers_are_what_their_sources_say(
    events: list[tuple[str, set[int]]],
) -> None:
    """With little room on the device and the host: what was brought is as if inserted here."""
    model = tiny("llama")
    texts = [random_tokens(40 + 17 * seed, seed).tolist() for seed in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        runner = tiered(model, max_tokens=448, store=folder, document_bytes=9 * BLOCK)
        for event, chosen in events:
            documents = [texts[number] for number in sorted(chosen)]
            if event == "evict":
                evict(runner)
            if event == "insert":
                for document in documents:
                    runner.insert(document, f"{len(document)}")
                    # Frozen it would stay on the device; its name in the store is left alone.
                    runner.cache.delete(f"{len(document)}")
                runner.flush()
            said = answer(runner, *documents, max_new_tokens=3)
            found = zip(documents, sources(said), strict=True)
            plain = tiered(model)
            for document in (one for one, source in found if source != "computed"):
                plain.insert(document, f"{len(document)}")
            assert said.tokens == answer(plain, *documents, max_new_tokens=3).tokens
            assert runner.tiers.stats()["reading_bytes"] == 0
            runner.cache.check()
            runner.tiers.host.cache.check()
        runner.close()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_no_namespace_gets_anothers_document(tmp_path: Path, tier: str) -> None:
    model = tiny("llama")
    where: dict[str, Any] = {"store": tmp_path} if tier == "disk" else {"document_bytes": BYTES}
    runner = tiered(model, **where)
    runner.insert(LETTER, "letter", "one")
    runner.flush()
    if tier == "disk":
        runner = tiered(model, **where)
    else:
        runner.delete("letter", "one")
        evict(runner)
    for namespace, expected in (("two", "computed"), ("", "computed"), ("one", tier)):
        assert sources(answer(runner, LETTER, of=namespace)) == [expected], namespace
    assert runner.restore(Store(tmp_path), "two") == []


def test_the_host_keeps_what_was_used_last_within_its_bytes() -> None:
    documents = [random_tokens(64, seed).tolist() for seed in range(6)]
    # Room for three documents of four blocks, the null block and one more.
    runner = tiered(tiny("llama"), document_bytes=14 * BLOCK)
    for number, document in enumerate(documents):
        runner.insert(document, f"{number}")
        runner.delete(f"{number}")
    evict(runner)
    found = [sources(answer(runner, document))[0] for document in documents]
    assert found == ["computed"] * 3 + ["host"] * 3
    counts = runner.tiers.stats()["host"]
    assert counts["total"] * BLOCK <= 14 * BLOCK
    too_long = random_tokens(300, 9).tolist()
    runner.insert(too_long, "too long")
    assert runner.tiers.stats()["documents"]["not on host"] == 1
    runner.tiers.host.cache.check()


def test_a_namespace_beyond_its_quota_evicts_its_own() -> None:
    runner = tiered(tiny("llama"), document_bytes=14 * BLOCK)
    runner.tiers.set_quota("greedy", bytes=4 * BLOCK)
    mine = random_tokens(64, 0).tolist()
    runner.insert(mine, "mine", "modest")
    for seed in range(1, 5):
        runner.insert(random_tokens(64, seed).tolist(), f"{seed}", "greedy")
        runner.delete(f"{seed}", "greedy")
    runner.delete("mine", "modest")
    evict(runner)
    assert sources(answer(runner, mine, of="modest")) == ["host"]


def test_computing_is_chosen_where_it_is_faster(tmp_path: Path) -> None:
    model = tiny("llama")
    written(tmp_path, model, LETTER)
    runner = tiered(model, store=tmp_path)
    runner.tiers.measured = Stated(Speeds(host=SLOW, disk=SLOW, compute=FAST))
    done = answer(runner, LETTER)
    plain = answer(tiered(model), LETTER)
    assert done.tokens == plain.tokens
    assert done.report.reused_segment == 0
    told = done.report.documents[1]
    assert told.source == "computed"
    assert "loading 92160 bytes from disk takes" in told.why
    assert "documents reused from: computed 3;" in repr(done.report)
    assert done.report.to_dict()["documents"][1]["why"] == told.why
    assert "reused from" in done._repr_html_()
    assert runner.insert(LETTER, "letter").tokens == 90


def test_a_conversation_finds_documents_too(tmp_path: Path) -> None:
    model = tiny("llama")
    written(tmp_path, model, LETTER, MANUAL)
    runner, plain = tiered(model, store=tmp_path), tiered(model)
    plain.insert(LETTER, "letter")
    plain.insert(MANUAL, "manual")
    said = []
    for one in (plain, runner):
        with one.conversation("naive") as talk:
            for document in (LETTER, MANUAL):
                told = talk.ask(prompt_of(document), max_new_tokens=4, stop=())
                said.append((told.tokens, told.report.reused_segment))
                assert one is plain or "disk" in [d.source for d in told.report.documents]
    assert said[:2] == said[2:]


def test_a_prompt_without_room_beside_its_documents_is_computed(tmp_path: Path) -> None:
    model = tiny("llama")
    written(tmp_path, model, LETTER)
    runner = tiered(model, store=tmp_path, max_tokens=128)
    done = answer(runner, LETTER, max_new_tokens=4)
    assert done.tokens == answer(tiered(model), LETTER, max_new_tokens=4).tokens
    assert sources(done) == ["computed"]
    assert "room" in done.report.documents[1].why
    assert runner.cache.stats()["held"] == 0


def test_what_is_no_tier_is_refused() -> None:
    model = tiny("llama")
    for wrong in ({"store": 7}, {"document_bytes": 0}, {"document_bytes": BLOCK}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            tiered(model, **wrong)
    with pytest.raises(InvalidArgument, match="expected a Store"):
        tiered(model).restore()


def test_a_folder_names_its_shards_as_the_runner_names_its_blocks(tmp_path: Path) -> None:
    model = tiny("llama")
    hostile, tame = tmp_path / "hostile", tmp_path / "tame"
    runner = tiered(model, store=hostile, hash="sha256")
    runner.insert(LETTER, "letter")
    runner.close()
    assert [len(path.stem) for path in (hostile / "shards").iterdir()] == [64]
    tiered(model, store=tame).close()
    assert (Store(hostile).hash, Store(tame).hash) == ("sha256", "xxh3-128")
    # A better name does no harm; a worse one is no name for hostile tenants.
    assert sources(answer(tiered(model, store=hostile), LETTER)) == ["disk"]
    with pytest.raises(InvalidArgument, match="hash: expected xxh3-128"):
        tiered(model, store=tame, hash="sha256")
    assert tiered(model, store=Store(tame), hash="sha256").tiers.disk.store.hash == "xxh3-128"


def test_a_folder_of_another_model_is_refused_unless_several_share_it(tmp_path: Path) -> None:
    model, other = tiny("llama"), tiny("llama")
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    written(tmp_path, model, LETTER)
    with pytest.raises(ForeignStore, match="or give a Store") as raised:
        tiered(other, store=tmp_path)
    owner = Store(tmp_path).model
    assert owner == tiered(model).spec.fingerprint
    assert raised.value.got == f"one of {owner}"
    assert sources(answer(tiered(other, store=Store(tmp_path)), LETTER)) == ["computed"]
    assert sources(answer(tiered(model, store=tmp_path), LETTER)) == ["disk"]


@needs_cuda
@pytest.mark.parametrize("mode", ["materialise", "share"])
def test_on_a_gpu(tmp_path: Path, mode: str) -> None:
    model = tiny("llama").to("cuda")
    said = written(tmp_path, model, LETTER, MANUAL)
    other = tiered(model, mode=mode, store=tmp_path, document_bytes=BYTES)
    assert other.tiers.host.pinned
    again = answer(other, LETTER, MANUAL)
    assert (again.tokens, sources(again)) == (said.tokens, ["disk", "disk"])
    evict(other)
    again = answer(other, LETTER, MANUAL)
    assert (again.tokens, sources(again)) == (said.tokens, ["host", "host"])
