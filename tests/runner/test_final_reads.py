"""Texts of several formats: read by a launch a format, wherever they come to lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from document_decoding import documents, fresh
from families import random_tokens
from final_tiers import same
from kvweave import ops
from kvweave.runner import Runner
from kvweave.runner.decode import final_reads
from kvweave.runner.decode.final_reads import FinalReads, FormatRead
from packed_decoding import steps_of
from strategy_runners import LAYERS, LONG, all_is_back, runner_of, uneven_model

STEPS = 12
ASKED: dict[str, Any] = {"reserve_tokens": 4 * STEPS, "remember": False, "watched": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return uneven_model()


def runner_with(model: Any, docs: list[Any], bound: float = 0.13) -> Runner:
    runner = runner_of(model, bound, max_tokens=24_000)
    for number, doc in enumerate(docs):
        runner.insert(doc.tokens, str(number))
    runner.flush()
    assert len(runner.packed.final.texts) == len(docs)
    return runner


def prompt_of(*docs: Any) -> list[Any]:
    """Some documents in a prompt of its own words."""
    between = [part for at, doc in enumerate(docs) for part in (fresh(40 + at, at), doc)]
    return [*between, fresh(3, 99)]


def reads_of(runner: Runner) -> FinalReads:
    """What the newest batch reads of final texts."""
    reads = runner._decoder._slots[-1].packed._final
    assert reads is not None
    return reads


def test_preparing_lists_nobodys_pages_and_changes_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, listed, write = runner_with(model, documents([LONG])), [], FormatRead.write
    pool = runner.packed
    before = pool.text_memory.data.clone()

    def kept(read: FormatRead, entries: torch.Tensor, counts: torch.Tensor) -> None:
        listed.append((read.form, entries, counts))
        write(read, entries, counts)

    monkeypatch.setattr(FormatRead, "write", kept)
    FinalReads.prepare(pool)
    assert [form for form, _, _ in listed] == [*range(1, 1 + len(pool.final_formats))] * 2
    for _, entries, counts in listed:
        assert not entries.any()
        assert counts.shape == (LAYERS, pool.kv_heads)
        assert len(torch.unique(counts)) == 1
    assert sorted({len(entries) for _, entries, _ in listed}) == [LAYERS * pool.kv_heads, 8192]
    assert torch.equal(pool.text_memory.data, before)
    runner.delete("0")
    assert all_is_back(runner)


def test_there_is_a_launch_a_format(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many texts and requests there are."""
    docs = documents([LONG, LONG + 200, LONG + 70])
    runner = runner_with(model, docs)
    pools = [runner.packed.text_memory.pages(of).data for of in runner.packed.final_formats]
    calls, attend = [], ops.attend_packed

    def counted(q: Any, positions: Any, entries: Any, kv: Any, **known: Any) -> Any:
        calls.append(any(kv.pages.data is pages for pages in pools))
        return attend(q, positions, entries, kv, **known)

    monkeypatch.setattr(ops, "attend_packed", counted)
    asked = [prompt_of(*docs), prompt_of(docs[2]), prompt_of(docs[1], docs[0])]
    dones = [runner.prefill(prompt, "naive", **ASKED) for prompt in asked]
    batch = [decoding(runner, done, STEPS) for done in dones]
    calls.clear()
    runner._decoder.step(batch)
    of_texts = {
        (part.format, int(rank) // runner.packed.kv_heads)
        for text in runner.packed.final.texts
        for part in text.parts
        for rank in part.ranks
    }
    assert len({of for of, _ in of_texts}) > 1
    assert sum(calls) == len(of_texts)
    assert len(calls) == len(of_texts) + LAYERS
    for done in dones:
        runner._decoder.forget(done.request)
        done.release()


def test_who_reads_a_text_that_moves_goes_on(model: Any) -> None:
    """What comes has room once the others lie close; not a bit of what is said changes."""
    docs = documents([LONG, LONG, LONG + 300, LONG + 900])
    said = []
    for moves in (False, True):
        runner = runner_with(model, docs[:3])
        memory = runner.packed.text_memory
        sizes = [text.nbytes for text in runner.packed.final.texts]
        with runner.prefill(prompt_of(docs[1], docs[2]), "naive", **ASKED) as done:
            sequence = decoding(runner, done, 3 * STEPS)
            logits = steps_of(runner, sequence, STEPS)
            if moves:
                used = max(place.end for text in runner.packed.final.texts for place in text.places)
                memory.data = memory.data[: used + sizes[0] // 2]
            runner.delete("0")
            runner.insert(docs[3].tokens, "more")
            runner.flush()
            assert len(runner.packed.final.texts) == 3
            assert (memory.moves > 0) == moves
            logits += steps_of(runner, sequence, STEPS)
        runner._decoder.forget(done.request)
        with runner.prefill(prompt_of(docs[3]), "naive", **ASKED) as done:
            logits += steps_of(runner, decoding(runner, done, STEPS), STEPS)
        said.append(torch.stack(logits))
    assert same(*said)


def test_it_stays_where_it_is(model: Any) -> None:
    """As requests and texts come and go, of the same formats, while there is room."""
    docs = documents([LONG, LONG])
    runner = runner_with(model, docs)
    known = None
    for doc in (docs[0], docs[1], docs[0]):
        # A batch that reads none comes between.
        with runner.prefill(random_tokens(300, 8), "full", **ASKED) as done:
            steps_of(runner, decoding(runner, done, STEPS), 2)
        with runner.prefill(prompt_of(doc), "naive", **ASKED) as done:
            steps_of(runner, decoding(runner, done, STEPS), 2)
            assert known is None or reads_of(runner) is known
            known = reads_of(runner)
    with runner.prefill(prompt_of(*docs), "naive", **ASKED) as done:
        steps_of(runner, decoding(runner, done, STEPS), 2)
        more = reads_of(runner)
        assert more is not known
        assert more.layers == known.layers
        pairs = zip(more.reads, known.reads, strict=True)
        assert all(len(one.entries) > len(other.entries) for one, other in pairs)
    for number in range(2):
        runner.delete(str(number))
    assert all_is_back(runner)


@pytest.mark.parametrize("at_once", [1, final_reads._AT_ONCE])
def test_entries_are_those_of_each_head(
    model: Any, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Table by table: a head's pages of a format, in all texts of a request, in their order."""
    monkeypatch.setattr(final_reads, "_AT_ONCE", at_once)
    docs = documents([LONG, 700])
    runner = runner_with(model, docs)
    pool = runner.packed
    asked = [prompt_of(docs[1], docs[0]), prompt_of(docs[0])]
    dones = [runner.prefill(prompt, "naive", **ASKED) for prompt in asked]
    batch = [decoding(runner, done, STEPS) for done in dones]
    runner._decoder.step(batch)
    for read in reads_of(runner).reads:
        of = pool.final_formats[read.form - 1]
        for layer in range(LAYERS):
            offsets = read.offsets[layer].tolist()
            for number, sequence in enumerate(batch):
                texts = pool.final.split(sequence.packed.entries())[1]
                for head in range(pool.kv_heads):
                    table = number * pool.kv_heads + head
                    own = read.entries[offsets[table] : offsets[table + 1]].numpy()
                    wanted = wanted_entries(texts, of, layer * pool.kv_heads + head)
                    assert np.array_equal(own, wanted)
    for done in dones:
        runner._decoder.forget(done.request)
        done.release()


def wanted_entries(texts: list[Any], of: ops.PackedFormat, rank: int) -> np.ndarray:
    """The entries of one page of each block, where a text has it in a format."""
    found = [np.zeros((0, 5), np.int32)]
    for text, entries in texts:
        for part in text.parts:
            at = np.flatnonzero(part.ranks == rank)
            if part.format != of or not len(at):
                continue
            own = entries.copy()
            own[:, 0] = part.places[0].number + len(part.ranks) * (1 + own[:, 0]) + at[0]
            found.append(own)
    together = np.concatenate(found)
    return together[np.argsort(together[:, 3])]
