"""Documents that are packed twice: at once, and finally in a basis of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from document_decoding import DocumentDecoding, documents, fresh
from families import random_tokens, tiny
from kvweave import OutOfMemory, PoolFull
from kvweave.runner import Packing, Runner, Segment
from kvweave.runner.kv.aside import Aside
from kvweave.runner.kv.pool_bases import PoolBases
from kvweave.runner.tiers import final_packing
from packed_decoding import apart, nothing_is_held, packed_runner, steps_of
from page_meaning import of_format, random_packing

SIZES = {"head_dim": 16, "max_position_embeddings": 8192, "num_hidden_layers": 2}
LONG = 1200
"""Tokens of a document that may have a basis of its own: an eighth of its pages' bytes."""

LONG_BY_FORMAT = {"half-int4": LONG, "planes-3": 3000}
formats = pytest.mark.parametrize("name", LONG_BY_FORMAT)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", **SIZES)


def runner_of(model: Any, name: str = "half-int4", **settings: Any) -> Runner:
    packing, _ = random_packing(name, 4, 16)
    given = {"kv_dtype": packing, "max_tokens": 16384, "chunk_tokens": 400, **settings}
    return packed_runner(model, **given)


@contextmanager
def held_back(monkeypatch: Any) -> Iterator[threading.Event]:
    """Final packings wait until the event is set."""
    go, made = threading.Event(), final_packing.Made

    def late(*given: Any) -> Any:
        assert go.wait(60)
        return made(*given)

    with monkeypatch.context() as patched:
        patched.setattr(final_packing, "Made", late)
        yield go
        go.set()


def numbers_of(runner: Runner) -> set[int]:
    """The bases that blocks are packed in."""
    assert runner.packed is not None
    assert runner.packed.bases is not None
    return set(runner.packed.bases.bases.of.unique().tolist())


def basis_of(runner: Runner, number: int) -> torch.Tensor:
    assert runner.packed is not None
    assert runner.packed.bases is not None
    return runner.packed.bases.bases.data[number]


def own_basis(runner: Runner) -> torch.Tensor:
    """The first that belongs to a document."""
    assert runner.packed is not None
    assert runner.packed.bases is not None
    return basis_of(runner, runner.packed.bases.first_own)


@formats
def test_a_document_is_read_in_its_own_basis(name: str, model: Any) -> None:
    """As the pages' definition in that basis; what is decoded lies in the shared one."""
    long = LONG_BY_FORMAT[name]
    docs, (_, shared) = documents([long, 80]), random_packing(name, 4, 16)
    prompt = [fresh(70, 1), docs[0], fresh(30, 2)]
    runner = runner_of(model, name)
    report = runner.encode(docs[0].tokens, "long")
    short = runner.encode(docs[1].tokens, "short")
    runner.flush()
    packing = report.packing
    assert (packing.basis, packing.waiting, packing.why) == ("own", False, "")
    assert packing.tokens == long
    assert sum(packing.chosen.values()) == 2 * 4
    for before, after in zip(packing.lost_first, packing.lost, strict=True):
        assert 0.0 < after < 0.9 * before
    assert short.packing.basis == "shared"
    assert short.packing.why == "too short for a basis of its own"
    assert runner.packing_stats() == {"final": 1, "kept": 0, "failed": 0, "copied_bytes": 0}
    assert numbers_of(runner) >= {runner.packed.bases.first_own}
    own = of_format(runner.packed.pages.format, own_basis(runner))
    asked = {"reserve_tokens": 140, "remember": False, "watched": False}
    with runner.prefill(prompt, "naive", **asked) as done:
        pages = -(-long // 64) * runner.packed.block_bytes
        assert done.report.shared_kv_bytes == pages + packing.basis_bytes
        sequence = decoding(runner, done, 140)
        logits = [done.logits[-1], *steps_of(runner, sequence, 139)]
        said = sequence.tokens
    doubles = [DocumentDecoding(model, 400, 16, shared, of, None, 1) for of in (own, shared)]
    wanted, first = (
        [each.prefill(prompt), *(each.step(token) for token in said[:-1])] for each in doubles
    )
    assert apart(first, wanted) > 1e-4
    assert apart(logits, wanted) < 0.05 * apart(first, wanted)


@pytest.mark.parametrize("shared", ["random", "of its own first tokens"])
def test_planes_have_the_basis_by_which_attention_moves_least(
    model: Any, monkeypatch: Any, shared: str
) -> None:
    """Of each page, against sums over the tokens in f64; keys and values have the same."""
    told: list[Any] = []
    made = final_packing.Made

    def heard(copy: Any, basis: torch.Tensor) -> Any:
        told.extend((copy.moments, copy.parts, basis))
        return made(copy, basis)

    monkeypatch.setattr(final_packing, "Made", heard)
    given = {} if shared == "random" else {"kv_dtype": "planes-3"}
    runner = runner_of(model, "planes-3", **given)
    packing = runner.encode(random_tokens(3000, 1), "long").packing
    runner.flush()
    moments, parts, basis = told
    whole = torch.cat([exact_of(part.cache, part.packs) for part in parts], 3).double()
    assert whole.shape == (4, 2, 1, 3000, 16)
    # Its first token is exact beside its pages.
    assert moments.left_out == 2 * 4
    whole = whole[:, :, :, 1:]
    candidates = {
        "own": torch.from_numpy(moments.basis()),
        "own, not centred": torch.from_numpy(moments.basis(centred=False)),
        "shared": basis,
    }
    metric, losses = torch.from_numpy(moments.metric), []
    for each in candidates.values():
        meaning = of_format(runner.packed.pages.format, each)
        layers = [meaning(layer, tuple(whole[2 * layer :][:2, :, 0].unbind(1))) for layer in (0, 1)]
        keys, values = (
            torch.cat(sides) - whole[:, side, 0]
            for side, sides in enumerate(zip(*layers, strict=True))
        )
        spread = whole[:, 1, 0].var(1, correction=0).sum(-1)
        moved = torch.einsum("ptd,pde,pte->p", keys, metric, keys) * spread / 16
        losses.append(moved + values.square().sum((1, 2)))
    best = torch.stack(losses).argmin(0)
    counts = torch.bincount(best, minlength=3).tolist()
    assert packing.chosen == {name: 2 * n for name, n in zip(candidates, counts, strict=True)}
    for page, number in enumerate(best.tolist()):
        wanted = list(candidates.values())[number][page]
        assert torch.equal(own_basis(runner)[page], wanted)


def exact_of(cache: torch.Tensor, packs: Any) -> torch.Tensor:
    """Keys and values [4, 2, 1, T, 16] of the pages that packs name."""
    rows = []
    for tokens, *blocks in packs[:, 1:].tolist():
        pages = [cache[block : block + 4] for block in blocks if block]
        rows.append(torch.cat(pages, 2)[:, :, None, :tokens])
    return torch.cat(rows, 3)


@formats
def test_who_decodes_meanwhile_goes_on_and_is_switched_between_two_calls(
    name: str, model: Any, monkeypatch: Any
) -> None:
    long = LONG_BY_FORMAT[name]
    docs, (_, shared) = documents([long]), random_packing(name, 4, 16)
    # Behind the document is more than what is read exactly.
    prompt = [fresh(70, 1), docs[0], fresh(150, 2)]
    runner = runner_of(model, name)
    with held_back(monkeypatch) as go:
        report = runner.encode(docs[0].tokens, "long")
        assert report.packing.waiting
        asked = {"reserve_tokens": 20, "remember": False, "watched": False}
        with runner.prefill(prompt, "naive", **asked) as done:
            sequence = decoding(runner, done, 20)
            logits = [done.logits[-1], *steps_of(runner, sequence, 5)]
            bytes_of = runner.packed.pages.data.clone()
            with runner._prefiller.computing:
                # Nobody's pages change while somebody computes.
                go.set()
                runner.flush()
                assert torch.equal(runner.packed.pages.data, bytes_of)
                assert report.packing.basis == "shared"
            assert report.packing.basis == "own"
            assert not torch.equal(runner.packed.pages.data, bytes_of)
            logits += steps_of(runner, sequence, 5)
            said = sequence.tokens
    own = of_format(runner.packed.pages.format, own_basis(runner))
    before, after = (DocumentDecoding(model, 400, 16, shared, of, None, 1) for of in (shared, own))
    wanted = [before.prefill(prompt), *(before.step(token) for token in said[:5])]
    assert apart(logits[:6], wanted) < 1e-4
    # What was computed over the first packing stays; documents are what they are now.
    after.prefill(prompt)
    for number, (kept, now) in enumerate(zip(before.layers, after.layers, strict=True)):
        for side in (0, 1):
            kept[side][:, 70 : 70 + long] = now[side][:, 70 : 70 + long]
        before.layers[number] = kept
    wanted = [before.step(token) for token in said[5:10]]
    assert apart(logits[6:], wanted) < 1e-4


@pytest.mark.parametrize("where", ["a job", "the thread"])
def test_a_worker_that_dies_leaves_the_first_packing(
    model: Any, monkeypatch: Any, where: str
) -> None:
    docs = documents([LONG])
    runner = runner_of(model)
    error: BaseException = (
        RuntimeError("a disk of eigenvectors")
        if where == "a job"
        else (SystemExit("the thread ends"))
    )

    def fails(*_given: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(final_packing, "Made", fails)
        report = runner.encode(docs[0].tokens, "long").packing
        runner.flush()
    assert (report.basis, report.waiting, report.lost) == ("shared", False, None)
    assert report.why.startswith("failed: ")
    assert str(error) in report.why
    assert min(report.lost_first) > 0.0
    assert runner.packing_stats() == {"final": 0, "kept": 0, "failed": 1, "copied_bytes": 0}
    prompt = [fresh(70, 1), docs[0], fresh(5, 2)]
    assert len(runner.generate(prompt, "naive", max_new_tokens=5, stop=[]).tokens) == 5
    # The next one has a thread again.
    again = runner.encode(random_tokens(LONG, 8), "next").packing
    runner.flush()
    assert again.basis == "own"


def test_a_shortage_at_the_switch_leaves_the_first_packing(model: Any, monkeypatch: Any) -> None:
    tokens = random_tokens(LONG, 8)
    runner = runner_of(model)

    def fails(*_given: Any) -> None:
        raise OutOfMemory("bases: expected memory for one, got none")

    with monkeypatch.context() as patched:
        patched.setattr(PoolBases, "write", fails)
        report = runner.encode(tokens, "long").packing
        runner.flush()
    assert (report.basis, report.waiting, report.lost) == ("shared", False, None)
    assert report.why == "failed: bases: expected memory for one, got none"
    assert runner.packing_stats()["failed"] == 1
    again = runner.encode(random_tokens(LONG, 9), "next").packing
    runner.flush()
    assert again.basis == "own"


def test_what_cannot_be_copied_leaves_the_first_packing(model: Any, monkeypatch: Any) -> None:
    """Of the second of three chunks; the next document is copied again."""
    runner, calls = runner_of(model), []

    def fails(_aside: Aside, tensor: torch.Tensor) -> torch.Tensor:
        calls.append(len(tensor))
        if len(calls) == 2:
            raise MemoryError("no room on the host")
        return tensor

    with monkeypatch.context() as patched:
        patched.setattr(Aside, "on_host", fails)
        report = runner.encode(random_tokens(LONG, 7), "long").packing
        runner.flush()
    assert len(calls) == 4
    assert (report.basis, report.waiting) == ("shared", False)
    assert report.why == "failed: no room on the host"
    assert runner.packing_stats() == {"final": 0, "kept": 0, "failed": 1, "copied_bytes": 0}
    again = runner.encode(random_tokens(LONG, 8), "next").packing
    runner.flush()
    assert again.basis == "own"


def test_decoding_goes_on_over_the_first_packing_of_a_worker_that_dies(
    model: Any, monkeypatch: Any
) -> None:
    """Between two of its steps: not a bit of what they say is otherwise."""
    docs = documents([LONG])
    prompt = [fresh(70, 1), docs[0], fresh(5, 2)]
    asked = {"reserve_tokens": 12, "remember": False, "watched": False}

    def fails(*_given: Any) -> None:
        raise RuntimeError("no memory for eigenvectors")

    said = []
    for dies in (False, True):
        runner = runner_of(model)
        with held_back(monkeypatch) as go, monkeypatch.context() as patched:
            if dies:
                patched.setattr(final_packing, "Made", fails)
            report = runner.encode(docs[0].tokens, "long").packing
            with runner.prefill(prompt, "naive", **asked) as done:
                sequence = decoding(runner, done, 12)
                logits = steps_of(runner, sequence, 5)
                if dies:
                    go.set()
                    runner.flush()
                    assert report.why.startswith("failed: ")
                said.append([*logits, *steps_of(runner, sequence, 5)])
            go.set()
            runner.flush()
    assert all(torch.equal(one, other) for one, other in zip(*said, strict=True))


def test_pages_stay_until_a_document_is_packed_finally(model: Any, monkeypatch: Any) -> None:
    """Whatever becomes of it meanwhile: no other text's pages are written."""
    runner = runner_of(model, max_tokens=2048, frozen_share=0.9)
    with held_back(monkeypatch) as go:
        report = runner.encode(random_tokens(LONG, 1), "long").packing
        runner.delete("long")
        with pytest.raises(PoolFull):
            runner.prefill(random_tokens(1900, 2), "prefix")
        assert runner.packed.stats()["held"] == 19
        go.set()
        runner.flush()
    assert report.basis == "own"
    assert nothing_is_held(runner)


def test_documents_that_are_not_copied_say_why(model: Any) -> None:
    packing, _ = random_packing("half-int4", 4, 16)
    runner = runner_of(model, kv_dtype=Packing("half-int4", packing.basis, copy_bytes=1000))
    report = runner.encode(random_tokens(LONG, 1), "long").packing
    assert (report.basis, report.why) == ("shared", "no room for its copy on the host")
    runner = runner_of(model)
    for _ in range(2):
        report = runner.encode(random_tokens(LONG, 1), "long").packing
    assert report.why == "packed before"
    runner.flush()
    assert runner.packing_stats()["final"] == 1
    runner.close()
    closed = runner.encode(random_tokens(LONG, 2), "closed").packing
    runner.flush()
    assert closed.why.startswith("failed: kvweave copying: expected one that is open")
    assert runner.packing_stats()["copied_bytes"] == 0


def test_bases_are_given_back_with_their_pages(model: Any) -> None:
    """A document more than there are bases for keeps the shared one; deleted ones make room."""
    runner = runner_of(model, max_tokens=4096, frozen_share=0.9)
    most = runner.packed.stats()["own_bases_most"]
    assert most == 3
    for turn in range(3 * most):
        report = runner.encode(random_tokens(LONG, turn), "a").packing
        runner.flush()
        assert report.basis == "own" or report.why == "no room for one more basis"
        runner.delete("a")
    assert runner.packing_stats()["final"] >= most
    assert runner.packed.stats()["own_bases"] <= most
    assert nothing_is_held(runner)


def test_what_is_not_finite_spoils_no_basis(model: Any) -> None:
    broken = tiny("llama", **SIZES)
    broken.get_input_embeddings().weight.data[7] = torch.nan
    tokens = np.asarray(random_tokens(LONG, 1))
    tokens[tokens == 7] = 8
    tokens[-1] = 7
    runner = runner_of(broken)
    report = runner.encode(tokens.tolist(), "long").packing
    runner.flush()
    assert report.basis == "own"
    assert np.isnan(report.lost).all()
    assert own_basis(runner).isfinite().all()
    document = Segment(tokens=tokens[:-1].tolist())
    runner.encode(document.tokens, "sound")
    prompt = [fresh(70, 1), document, fresh(5, 2)]
    assert runner.prefill(prompt, "naive", watched=False).logits.isfinite().all()


def test_a_format_without_bases_has_no_thread(model: Any) -> None:
    runner = packed_runner(tiny("llama", head_dim=16))
    assert runner.encode(random_tokens(300, 1), "a").packing is None
    assert runner.packing_stats() == {}
    runner.flush()
    runner.close()
