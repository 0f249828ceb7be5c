"""Packed documents in the host's memory and in a store: as they are, with the bases they need."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from families import random_tokens, tiny
from kvweave import InvalidArgument, PoolFull, Runner, Store, StoreDegraded
from kvweave.runner.kv.pool_bases import REFINED, SHARED
from kvweave.runner.tiers import packed_form
from kvweave.runner.tiers.choice import Speeds
from packed_decoding import nothing_is_held, packed_runner
from page_meaning import random_packing
from tiered_runners import FAST, SLOW, Stated, logits_behind

SIZES = {"head_dim": 16, "max_position_embeddings": 8192, "num_hidden_layers": 2}
SHORT = random_tokens(200, 2).tolist()
KINDS = ["int4", "int8", "half-int4", "quarter-bf16", "planes-3", "truncated fp8"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", **SIZES)


def long_of(kind: str) -> list[int]:
    """A document that is long enough for a basis of its own, if its format has any."""
    return random_tokens(3000 if kind == "planes-3" else 1200, 1).tolist()


def tiered(model: Any, kind: str, seed: int = 1, **settings: Any) -> Runner:
    """A runner for which loading is always worth it; the shared basis is drawn by a seed."""
    packing, _ = random_packing(kind, 4, 16, seed)
    given = {"kv_dtype": packing, "max_tokens": 8192, "chunk_tokens": 400, **settings}
    runner = packed_runner(model, **given)
    assert runner.tiers is not None
    runner.tiers.measured = Stated(Speeds(host=FAST, disk=FAST, compute=SLOW))
    return runner


def logits_of(runner: Runner, *docs: list[int], namespace: str = "") -> tuple[Any, list[str]]:
    """Behind documents the logits of 60 tokens, and where these came from."""
    return logits_behind(runner, *docs, namespace=namespace, said=60)


def leave_the_device(runner: Runner) -> None:
    """Deletes all documents, and fills the pool with other text."""
    for segment in runner.segments():
        runner.packed.cache.delete(segment.name, segment.namespace)
    for seed in range(20, 24):
        with suppress(PoolFull):
            runner.prefill(random_tokens(3000, seed), "full").release()
        with suppress(PoolFull):
            room = runner.packed.cache.stats()["free"] * 64
            runner.packed.cache.admit(random_tokens(max(room, 64), seed), reuse="none").release()


@pytest.mark.parametrize("kind", KINDS)
def test_documents_come_back_from_the_host_as_they_were(model: Any, kind: str) -> None:
    runner, long = tiered(model, kind, document_bytes=1 << 23), long_of(kind)
    runner.insert(long, "long")
    runner.insert(SHORT, "short")
    runner.flush()
    wanted, found = logits_of(runner, long, SHORT)
    assert found == ["device", "device"]
    if runner.packed.bases is not None:
        assert runner.packing_stats()["final"] == 1
    leave_the_device(runner)
    runner.packed.pages.data.fill_(0xA5)
    got, found = logits_of(runner, long, SHORT)
    assert found == ["host", "host"]
    assert torch.equal(got, wanted)
    assert runner.tiers.stats()["host"]["block_bytes"] == runner.packed.block_bytes
    assert nothing_is_held(runner)


@pytest.mark.parametrize("kind", ["half-int4", "planes-3"])
def test_what_was_packed_in_the_first_shared_basis_comes_back_in_it(
    model: Any, kind: str, tmp_path: Path
) -> None:
    """Though there is a second by then: in a basis that is there already, and in its own bits.

    From the host's memory, and from a store by a runner that has other bases.
    """
    given = {"kv_dtype": kind, "store": tmp_path, "document_bytes": 1 << 23}
    runner = tiered(model, kind, **given)
    bases = runner.packed.bases
    runner.prefill(random_tokens(600, 9), "full", remember=False).release()
    runner.insert(SHORT, "short")
    runner.flush()
    assert bases.shared == SHARED
    wanted, found = logits_of(runner, SHORT)
    assert found == ["device"]
    leave_the_device(runner)
    assert bases.shared == REFINED
    runner.packed.pages.data.fill_(0xA5)
    got, found = logits_of(runner, SHORT)
    assert found == ["host"]
    assert torch.equal(got, wanted)
    assert SHARED in bases.bases.of.tolist()
    assert runner.packed.stats()["own_bases"] == 0
    assert nothing_is_held(runner)
    runner.close()
    other = tiered(model, kind, **given)
    got, found = logits_of(other, SHORT)
    assert found == ["disk"]
    assert torch.equal(got, wanted)
    assert other.packed.stats()["own_bases"] == 1


@pytest.mark.parametrize("kind", ["int4", "half-int4"])
def test_documents_that_begin_alike_come_back_from_the_host(model: Any, kind: str) -> None:
    """Each block in the basis that it was packed in, whichever of them it is of."""
    runner = tiered(model, kind, document_bytes=1 << 23)
    whole = random_tokens(1200, 1).tolist()
    docs = [whole, whole[:128] + random_tokens(1100, 2).tolist(), whole[:192], whole[:200]]
    wanted = []
    for number, doc in enumerate(docs):
        runner.insert(doc, str(number))
        runner.flush()
        wanted.append(logits_of(runner, doc)[0])
        leave_the_device(runner)
    for doc, logits in zip(docs, wanted, strict=True):
        got, found = logits_of(runner, doc)
        assert found == ["host"]
        # What begins another document is that one's, packed in its basis.
        assert float((got - logits).abs().max()) < (1e-6 if kind == "int4" else 0.1)
        leave_the_device(runner)
    assert nothing_is_held(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_a_runner_that_starts_again_reads_its_store(model: Any, kind: str, tmp_path: Path) -> None:
    """Also one whose own shared basis is another: what was packed in the old one keeps it."""
    first, long = tiered(model, kind, store=tmp_path), long_of(kind)
    first.insert(long, "long")
    first.insert(SHORT, "short")
    first.flush()
    wanted, _ = logits_of(first, long, SHORT)
    again = tiered(model, kind, store=tmp_path, seed=2)
    assert {segment.name for segment in again.restore()} == {"long", "short"}
    got, found = logits_of(again, long, SHORT)
    assert found == ["device", "device"]
    # What the prompt itself has packed is in the other shared basis.
    assert float((got - wanted).abs().max()) < 1e-5
    unnamed = tiered(model, kind, store=tmp_path)
    got, found = logits_of(unnamed, long, SHORT)
    assert found == ["disk", "disk"]
    assert torch.equal(got, wanted)
    for runner in (first, again):
        for segment in runner.segments():
            runner.delete(segment.name)
        assert nothing_is_held(runner)


def test_a_store_that_is_named_has_it_when_insert_returns(model: Any, tmp_path: Path) -> None:
    runner, long = tiered(model, "half-int4", document_bytes=1 << 23), long_of("half-int4")
    store = Store(tmp_path)
    runner.insert(long, "long", store=store)
    assert [name for _, name, _ in store.documents("")] == ["long"]
    assert [one.cost for one in store.list()] == [runner._knowledge._form.flops(0, len(long))]
    assert runner.packing_stats()["final"] == 1
    wanted, _ = logits_of(runner, long)
    other = tiered(model, "half-int4", document_bytes=1 << 23)
    other.insert(long, "long", store=store)
    # Nothing was computed, or packed anew.
    assert other.packing_stats()["final"] == 0
    assert torch.equal(logits_of(other, long)[0], wanted)


def test_other_formats_models_and_namespaces_find_nothing(model: Any, tmp_path: Path) -> None:
    first = tiered(model, "half-int4", store=tmp_path)
    first.insert(SHORT, "short", "mine")
    first.flush()
    for kind in ("int4", "int8", "quarter-bf16", "planes-3"):
        assert logits_of(tiered(model, kind, store=tmp_path), SHORT, namespace="mine")[1] == [
            "computed"
        ]
    plain = Runner(model, max_tokens=2048, store=tmp_path, check=False, progress=False)
    plain.tiers.measured = Stated(Speeds(host=FAST, disk=FAST, compute=SLOW))
    assert logits_of(plain, SHORT, namespace="mine")[1] == ["computed"]
    same = tiered(model, "half-int4", store=tmp_path)
    assert logits_of(same, SHORT)[1] == ["computed"]
    assert logits_of(same, SHORT, namespace="mine")[1] == ["disk"]


def test_shards_of_another_layout_find_nothing(
    model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A release that lays parts out in another way computes; what the former wrote stays sound."""
    first = tiered(model, "half-int4", store=tmp_path)
    first.insert(SHORT, "short")
    first.flush()
    wanted, _ = logits_of(first, SHORT)
    with monkeypatch.context() as patched:
        patched.setattr(packed_form, "VERSION", packed_form.VERSION + 1)
        later = tiered(model, "half-int4", store=tmp_path)
        assert logits_of(later, SHORT)[1] == ["computed"]
    got, found = logits_of(tiered(model, "half-int4", store=tmp_path), SHORT)
    assert found == ["disk"]
    assert torch.equal(got, wanted)


def test_shards_that_were_spoiled_are_refused(model: Any, tmp_path: Path) -> None:
    """Wherever a byte was changed: it is computed, and somebody is told."""
    first = tiered(model, "half-int4", store=tmp_path)
    first.insert(SHORT, "short")
    first.flush()
    wanted, _ = logits_of(first, SHORT)
    (path,) = (tmp_path / "shards").glob("*.kv")
    sound = path.read_bytes()
    for at in np.linspace(100, len(sound) - 100, 7).astype(int):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 0x41]) + sound[at + 1 :])
        runner = tiered(model, "half-int4", store=tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreDegraded)
            got, found = logits_of(runner, SHORT)
        # Bytes between parts say nothing.
        assert found == ["computed"] or torch.equal(got, wanted)
        assert got.isfinite().all()


def numbers(number: int) -> torch.Tensor:
    """That all blocks of a document are in the basis of a number."""
    return torch.full((3,), number, dtype=torch.int32)


@pytest.mark.parametrize(
    ("kind", "part", "value", "said"),
    [
        ("half-int4", "bases", torch.full((1, 4, 2, 17, 16), torch.nan), "bases: expected finite"),
        ("half-int4", "which", numbers(9), "which: expected numbers of bases"),
        ("half-int4", "which", numbers(-1), "which: expected numbers of bases"),
        ("half-int4", "pages", torch.zeros(2, 4, 1024, dtype=torch.uint8), "pages: expected"),
        # Codes of planes have their steps in a basis alone.
        ("planes-3", "which", numbers(0), "which: expected numbers of bases"),
        ("planes-3", "bases", torch.full((1, 4, 2, 34, 16), 8.0), "bits of a basis: .* 32 bytes"),
        ("planes-3", "bases", torch.full((1, 4, 2, 34, 16), 3.0), "bits of a basis: .* got others"),
    ],
)
def test_parts_that_cannot_be_are_refused(
    model: Any, tmp_path: Path, kind: str, part: str, value: torch.Tensor, said: str
) -> None:
    """Of a shard whose checksums agree: somebody wrote it so."""
    first = tiered(model, kind, store=tmp_path)
    form = first._knowledge._form
    with first.prefill(random_tokens(192, 2), "full") as done:
        document = form.export(done.kv.packed.request)
    parts = {**document.parts, part: value}
    tokens = document.tokens
    first.tiers.disk.store.put(document.header, tokens, parts)
    runner = tiered(model, kind, store=tmp_path)
    with pytest.warns(StoreDegraded, match=said):
        assert logits_of(runner, tokens.tolist())[1] == ["computed"]


def test_without_room_for_its_basis_a_document_is_computed(model: Any, tmp_path: Path) -> None:
    first = tiered(model, "half-int4", store=tmp_path)
    first.insert(SHORT, "short")
    first.flush()
    # Too small for any basis but the shared one, which is another.
    runner = tiered(model, "half-int4", store=tmp_path, seed=3, max_tokens=700)
    assert runner.packed.stats()["own_bases_most"] == 0
    got, found = logits_of(runner, SHORT)
    assert found == ["computed"]
    assert got.isfinite().all()
    with pytest.raises(PoolFull, match="bases: expected room for one more, got 0"):
        runner.restore(name="short")
    assert nothing_is_held(runner)


def test_bytes_that_hold_no_packed_block_are_refused(model: Any) -> None:
    for kind in KINDS:
        with pytest.raises(InvalidArgument, match="document_bytes: expected at least") as refused:
            tiered(model, kind, document_bytes=2000)
        least = int(str(refused.value).split("at least ")[1].split(",")[0])
        tiered(model, kind, document_bytes=least)
