"""Documents of several formats in a store: as they are, of one strategy, and nothing believed."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from final_tiers import DOC, SHORT, SIGHTS, final_runner, leave_the_device, same
from kvweave import PoolFull, Store, StoreDegraded, ops
from kvweave.runner import Packing, Runner, Strategy
from kvweave.runner.tiers import final_form, packed_form
from kvweave.runner.tiers.final_form import FORMATS
from page_meaning import random_packing
from strategy_runners import (
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    all_is_back,
    held_back,
    text_of,
    uneven_model,
)
from tiered_runners import logits_behind, prompt_of

PAGES = LAYERS * HEADS


@pytest.fixture(scope="module")
def model() -> Any:
    return uneven_model()


def stored(model: Any, folder: Path, doc: list[int] = DOC, **settings: Any) -> tuple[Runner, Any]:
    """A runner that has a document in its store, and what follows a prompt that has it."""
    runner = final_runner(model, store=folder, **settings)
    runner.insert(doc, "one")
    runner.flush()
    assert text_of(runner).parts
    return runner, logits_behind(runner, doc)[0]


@pytest.mark.parametrize("sights", [None, SIGHTS])
@pytest.mark.parametrize("kind", ["int4", "int8", "quarter-bf16"])
def test_a_runner_that_starts_again_reads_its_store(
    model: Any, tmp_path: Path, kind: str, sights: Any
) -> None:
    given: dict[str, Any] = {"sights": sights, "store": tmp_path}
    first = final_runner(model, kind, **given)
    report = first.encode(DOC, "long").packing
    first.insert(SHORT, "short")
    first.flush()
    assert len(report.formats) > 1
    wanted = logits_behind(first, DOC, SHORT)[0]
    again = final_runner(model, kind, **given)
    assert {segment.name for segment in again.restore()} == {"long", "short"}
    for name in ("final_blocks", "final_bytes", "most_lost", "over_bound"):
        assert again.packed.stats()[name] == first.packed.stats()[name]
    got, found = logits_behind(again, DOC, SHORT)
    assert found == ["device", "device"]
    assert same(got, wanted)
    unnamed = final_runner(model, kind, **given, document_bytes=1 << 23)
    got, found = logits_behind(unnamed, SHORT, DOC)
    assert found == ["disk", "disk"]
    assert same(got, logits_behind(first, SHORT, DOC)[0])
    leave_the_device(unnamed)
    got, found = logits_behind(unnamed, DOC, SHORT)
    assert found == ["host", "host"]
    assert same(got, wanted)
    for runner in (first, again, unnamed):
        leave_the_device(runner)


def test_what_is_not_final_is_kept_as_it_was_packed_first(
    model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    first = final_runner(model, "int4", store=tmp_path)
    with held_back(monkeypatch) as go:
        first.insert(DOC, "long")
        wanted = logits_behind(first, DOC)[0]
        first.delete("long")
        go.set()
        first.flush()
    again = final_runner(model, "int4", store=tmp_path)
    got, found = logits_behind(again, DOC)
    assert found == ["disk"]
    assert same(got, wanted)
    assert again.packed.stats()["final_blocks"] == 0


def test_a_store_that_is_named_has_it_when_insert_returns(model: Any, tmp_path: Path) -> None:
    """Also where the text is inserted once more, and is packed finally already."""
    runner = final_runner(model, document_bytes=1 << 23)
    stores = [Store(tmp_path / name) for name in ("one", "other")]
    for store in stores:
        runner.insert(DOC, "long", store=store)
        assert [name for _, name, _ in store.documents("")] == ["long"]
        assert [one.cost for one in store.list()] == [runner._knowledge._form.flops(0, len(DOC))]
    assert runner.packing_stats()["final"] == 1
    wanted = logits_behind(runner, DOC)[0]
    for store in stores:
        other = final_runner(model, document_bytes=1 << 23)
        other.insert(DOC, "long", store=store)
        assert other.packing_stats()["final"] == 0
        assert text_of(other).nbytes == text_of(runner).nbytes
        assert same(logits_behind(other, DOC)[0], wanted)
        other.insert(DOC, "twice", store=store)
        assert len(other.packed.final.texts) == 1
        leave_the_device(other)


def test_other_strategies_formats_and_namespaces_find_nothing(model: Any, tmp_path: Path) -> None:
    """A bound, candidates or a fallback that are others, no strategy, and another pool's format."""
    first = final_runner(model, "int4", store=tmp_path)
    first.insert(DOC, "long", "mine")
    first.flush()
    found = ops.top_r_candidates(DIM)
    others = [
        Packing("int4", strategy=Strategy(0.14)),
        Packing("int4", strategy=Strategy(0.13, found[1:])),
        Packing("int4", strategy=Strategy(0.13, fallback="int8")),
        Packing("int8", strategy=Strategy(0.13)),
        Packing("int4"),
    ]
    for packing in others:
        other = final_runner(model, store=tmp_path, kv_dtype=packing)
        assert logits_behind(other, DOC, namespace="mine")[1] == ["computed"]
        with pytest.warns(StoreDegraded, match="layout"):
            assert other.restore(namespace="mine") == []
    # A share of room is none of these, and an order of the same candidates is another strategy's.
    alike = Packing("int4", strategy=Strategy(0.13, found, final_share=0.9))
    same_one = final_runner(model, store=tmp_path, kv_dtype=alike)
    assert logits_behind(same_one, DOC)[1] == ["computed"]
    assert logits_behind(same_one, DOC, namespace="mine")[1] == ["disk"]
    assert text_of(same_one).nbytes == text_of(first).nbytes
    plain = final_runner(model, store=tmp_path, kv_dtype=Packing("int4"))
    plain.insert(SHORT, "short")
    plain.flush()
    assert logits_behind(first, SHORT)[1] == ["computed"]


@pytest.mark.parametrize("module", [final_form, packed_form])
def test_shards_of_another_layout_find_nothing(
    model: Any, tmp_path: Path, monkeypatch: Any, module: Any
) -> None:
    _, wanted = stored(model, tmp_path, SHORT)
    with monkeypatch.context() as patched:
        patched.setattr(module, "VERSION", module.VERSION + 1)
        later = final_runner(model, store=tmp_path)
        assert logits_behind(later, SHORT)[1] == ["computed"]
        with pytest.warns(StoreDegraded, match="layout"):
            assert later.restore() == []
    got, found = logits_behind(final_runner(model, store=tmp_path), SHORT)
    assert found == ["disk"]
    assert same(got, wanted)


# ---- hostile ------------------------------------------------------------------------------


def test_shards_that_were_spoiled_are_refused(model: Any, tmp_path: Path) -> None:
    """Wherever a byte was changed or the file ends: computed, and somebody is told."""
    _, wanted = stored(model, tmp_path, SHORT)
    (path,) = (tmp_path / "shards").glob("*.kv")
    sound = path.read_bytes()
    places = np.linspace(100, len(sound) - 100, 7).astype(int).tolist()
    for at in places:
        changed = sound[:at] + bytes([sound[at] ^ 0x41]) + sound[at + 1 :]
        for data in (changed, sound[:at]):
            path.write_bytes(data)
            runner = final_runner(model, store=tmp_path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", StoreDegraded)
                got, found = logits_behind(runner, SHORT)
            # Bytes between parts say nothing.
            assert found == ["computed"] or same(got, wanted)
            assert got.isfinite().all()


def listed(change: Any) -> Any:
    """What makes of a document's list of formats another."""

    def changed(parts: dict[str, torch.Tensor]) -> dict[str, Any]:
        data = json.loads(parts[FORMATS].numpy().tobytes())
        made = change(data)
        text = made if isinstance(made, bytes) else json.dumps(data).encode()
        return {FORMATS: torch.from_numpy(np.frombuffer(text, np.uint8).copy())}

    return changed


def put(*at: Any) -> Any:
    """Puts the last of these where the others point."""

    def change(data: Any) -> None:
        for key in at[:-2]:
            data = data[key]
        data[at[-2]] = at[-1]

    return listed(change)


def part(name: str, change: Any) -> Any:
    """What makes of a part another."""
    return lambda parts: {name: change(parts[name])}


def basis_of(parts: dict[str, torch.Tensor]) -> str:
    return next(name for name in parts if name.startswith("basis."))


FORMAT = "formats", 0, "format"
HOSTILE = {
    "ranks: expected each of 4": listed(lambda data: data["formats"].pop()),
    "format: expected one of": put(*FORMAT, "scales", "f16"),
    "format kind: expected a string": put(*FORMAT, "kind", 7),
    "format: kind": put(*FORMAT, "kind", "int3"),
    "format kept: expected an integer": put(*FORMAT, "kept", 1e9),
    "format page_tokens: expected": put(*FORMAT, "page_tokens", 10**400),
    "ranks: expected sorted integers": put("formats", 0, "ranks", [1, 0]),
    "ranks: expected sorted integers, one": put("formats", 0, "ranks", []),
    "ranks: expected sorted": put("formats", 0, "ranks", [True]),
    "ranks: expected a list": put("formats", 0, "ranks", "0"),
    "ranks: expected each of": put("formats", 0, "ranks", [0, 0, 1, 2, 3]),
    "ranks: expected each of 4 pages": put("formats", 0, "ranks", [-1]),
    "ranks: expected each of 4 pages once": put("formats", 0, "ranks", [2**70]),
    "formats: expected a list": put("formats", None),
    "formats: expected each once": listed(lambda data: data["formats"].append(data["formats"][0])),
    "format ranks: expected a mapping": put("formats", 0, 3),
    "formats: expected the fields": put("more", 1),
    "most_lost: expected": put("most_lost", -0.1),
    "most_lost: expected a share": put("most_lost", float("nan")),
    "most_lost: expected a share from 0": put("most_lost", "0"),
    "most_lost: expected a share from 0 on": put("most_lost", 10**400),
    "over_bound: expected": put("over_bound", PAGES + 1),
    "over_bound: expected an": put("over_bound", True),
    "header: expected JSON": listed(lambda _: b"{"),
    "header: expected JSON, got": listed(lambda _: b"[" * 100_000),
    "formats: expected UTF-8": listed(lambda _: b"\xff\xff"),
    "formats: expected a mapping": listed(lambda _: b"[]"),
    "part formats: expected up to": listed(lambda _: b" " * (1 << 22) + b"{}"),
    "part pages.0: expected": part("pages.0", lambda data: data[:1]),
    "part pages.1: expected": part("pages.1", lambda data: data[..., :-1].contiguous()),
}


@pytest.fixture(scope="module")
def sound(model: Any, tmp_path_factory: Any) -> Any:
    """A document as it is stored, in formats of more than one kind."""
    runner, _ = stored(model, tmp_path_factory.mktemp("sound"))
    assert len(text_of(runner).parts) > 1
    return runner._knowledge._form.export(text_of(runner).held)


@pytest.mark.parametrize("said", HOSTILE)
def test_parts_that_cannot_be_are_refused(
    model: Any, sound: Any, tmp_path: Path, said: str
) -> None:
    """Of a shard whose checksums agree: somebody wrote it so."""
    parts = {name: one.clone() for name, one in sound.parts.items()}
    spoil(tmp_path, sound, HOSTILE[said](parts))
    refused(model, tmp_path, said)


def spoil(folder: Path, document: Any, changed: dict[str, Any]) -> None:
    parts = {name: one.contiguous() for name, one in {**document.parts, **changed}.items()}
    store = Store(folder)
    name, _ = store.put(document.header, document.tokens, parts)
    store.name("", "one", name)


def refused(model: Any, folder: Path, said: str) -> None:
    """That a runner computes the store's document, and says why."""
    runner = final_runner(model, store=folder)
    with pytest.warns(StoreDegraded, match=said):
        got, found = logits_behind(runner, DOC)
    assert found == ["computed"]
    assert got.isfinite().all()
    with pytest.warns(StoreDegraded, match=said):
        assert runner.restore() == []
    assert all_is_back(runner)


def test_bases_that_cannot_be_are_refused(model: Any, sound: Any, tmp_path: Path) -> None:
    name = basis_of(sound.parts)
    for at, (change, said) in enumerate(
        (
            (lambda basis: basis * torch.nan, "expected finite numbers"),
            (lambda basis: basis[:, :, 1:], "expected .* bytes"),
            (lambda basis: basis[:, :, :0], "expected .* bytes"),
        )
    ):
        folder = tmp_path / str(at)
        spoil(folder, sound, {name: change(sound.parts[name].clone())})
        refused(model, folder, f"part {name}: {said}")
    left = {key: one for key, one in sound.parts.items() if key != name}
    spoil(tmp_path / "left", replace(sound, parts=left), {})
    refused(model, tmp_path / "left", f"part {name}: expected .* bytes, got None")
    left = {key: one for key, one in sound.parts.items() if key != FORMATS}
    spoil(tmp_path / "none", replace(sound, parts=left), {})
    refused(model, tmp_path / "none", "part formats: expected up to")


def test_pages_of_any_bytes_are_read(model: Any, tmp_path: Path) -> None:
    """Nothing is read outside of them, and nobody else's answer changes."""
    runner, wanted = stored(model, tmp_path / "sound")
    document = runner._knowledge._form.export(text_of(runner).held)
    generator = torch.Generator().manual_seed(3)
    for at, fill in enumerate((0, 255, None)):
        changed = {}
        for name, one in document.parts.items():
            if name.startswith("pages."):
                made = torch.empty_like(one, memory_format=torch.contiguous_format)
                changed[name] = (
                    made.random_(generator=generator) if fill is None else made.fill_(fill)
                )
        folder = tmp_path / str(at)
        spoil(folder, document, changed)
        other = final_runner(model, store=folder)
        other.restore()
        logits_behind(other, DOC)
        other.insert(SHORT, "short")
        other.flush()
        assert logits_behind(other, SHORT)[0].isfinite().all()
        leave_the_device(other)
    assert same(logits_behind(runner, DOC)[0], wanted)


# ---- room ---------------------------------------------------------------------------------


def test_one_without_room_is_computed_or_refused(model: Any, tmp_path: Path) -> None:
    stored(model, tmp_path, kind="int8", bound=0.9)
    small = final_runner(model, "int8", 0.9, 0.01, store=tmp_path)
    got, found = logits_behind(small, DOC)
    assert found == ["computed"]
    assert got.isfinite().all()
    with pytest.raises(PoolFull, match=r"packed documents: expected room for \d+ bytes"):
        small.restore(name="one")
    assert all_is_back(small)


def test_a_document_in_a_basis_that_has_no_room_is_computed(
    model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """One in the pool's format, whose shared basis is another than here."""
    packing, _ = random_packing("half-int4", PAGES, DIM)
    of = Strategy(0.13)
    first = final_runner(model, store=tmp_path, kv_dtype=replace(packing, strategy=of))
    with held_back(monkeypatch) as go:
        first.insert(SHORT, "one")
        first.delete("one")
        go.set()
        first.flush()
    packing, _ = random_packing("half-int4", PAGES, DIM, 2)
    other = final_runner(model, store=tmp_path, kv_dtype=replace(packing, strategy=of))
    got, found = logits_behind(other, SHORT)
    assert found == ["computed"]
    assert got.isfinite().all()
    with pytest.raises(PoolFull, match="bases: expected room for one more"):
        other.restore(name="one")
    assert all_is_back(other)


def test_an_engine_reads_it_and_who_leaves_lets_it_go(model: Any, tmp_path: Path) -> None:
    """While it is read from disk, and while it is brought."""
    stored(model, tmp_path)
    runner = final_runner(model, store=tmp_path, max_tokens=1 << 14, chunk_tokens=4096)
    how: dict[str, Any] = {"max_new_tokens": 20, "remember": False, "stop": []}
    alone = runner.generate(prompt_of(DOC), "naive", **how).tokens
    leave_the_device(runner)
    for steps in (0, 1, 2):
        engine = runner.engine(token_budget=4096, chunk_tokens=400)
        asked = [engine.submit(prompt_of(DOC), "naive", **how) for _ in range(2)]
        for _ in range(steps):
            engine.step()
        assert engine.cancel(asked[0])
        engine.run()
        assert asked[1].result().tokens == alone
        assert runner.packed.stats()["final_blocks"] in (0, BLOCKS)
        leave_the_device(runner)
