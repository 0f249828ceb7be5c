"""Packed documents on another machine: as they are, of one format, and nothing believed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from families import random_tokens, tiny
from final_tiers import DOC, SIGHTS, final_runner, same
from kvweave import RemoteStore, StoreDegraded, ops
from kvweave.runner.tiers.choice import Speeds
from packed_decoding import packed_runner
from page_meaning import random_packing
from remote_servers import service_of
from strategy_runners import text_of, uneven_model
from tiered_runners import FAST, SLOW, Stated, logits_behind

pytest.importorskip("opendal", reason="the extra kvweave[remote] is not installed")

KINDS = ["int4", "int8", "half-int4", "quarter-bf16", "planes-3"]
MANUAL = random_tokens(3000, 1).tolist()
"""Long enough for a basis of its own in any format."""


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"head_dim": 16, "max_position_embeddings": 8192, "num_hidden_layers": 2}
    return tiny("llama", **sizes)


@pytest.fixture(scope="module")
def uneven() -> Any:
    return uneven_model()


@pytest.fixture(params=["fs", "redis"])
def service(request: Any, tmp_path: Path) -> Iterator[Callable[..., RemoteStore]]:
    (tmp_path / "remote").mkdir()
    with service_of(request.param, tmp_path / "remote") as opened:
        yield opened


def reads_at_once(runner: Any) -> Any:
    """The same, for which reading is always worth it."""
    runner.tiers.measured = Stated(Speeds(FAST, FAST, SLOW, FAST))
    return runner


def remote_runner(model: Any, kind: str, remote: RemoteStore, **more: Any) -> Any:
    """One whose shared basis is drawn, as is that of all others of its kind."""
    packing, _ = random_packing(kind, 4, 16)
    given = {"kv_dtype": packing, "max_tokens": 8192, "chunk_tokens": 400, **more}
    return reads_at_once(packed_runner(model, remote=remote, **given))


def strategy_runner(model: Any, remote: RemoteStore, bound: float = 0.13, **more: Any) -> Any:
    return reads_at_once(final_runner(model, bound=bound, remote=remote, **more))


def folder_store(folder: Path) -> RemoteStore:
    return RemoteStore("fs", {"root": str(folder)})


def shard_in(folder: Path) -> Path:
    """The one object that a folder has."""
    (held,) = (folder / "shards").iterdir()
    return held


@pytest.mark.parametrize("kind", KINDS)
def test_another_machine_reads_what_one_has_packed(
    model: Any, service: Callable[..., RemoteStore], kind: str, tmp_path: Path
) -> None:
    """To the bit, in a basis of its own too; from then on it is nearer."""
    secret = os.urandom(32)
    first = remote_runner(model, kind, service(secret=secret))
    first.insert(MANUAL, "manual", "tenant")
    first.flush()
    assert first.tiers.stats()["remote"]["written"] == 1
    if first.packed.bases is not None:
        assert first.packing_stats()["final"] == 1
    wanted, found = logits_behind(first, MANUAL, namespace="tenant")
    assert found == ["device"]
    other = remote_runner(model, kind, service(secret=secret), store=tmp_path / "disk")
    got, found = logits_behind(other, MANUAL, namespace="tenant")
    assert found == ["remote"]
    assert torch.equal(got, wanted)
    assert logits_behind(other, MANUAL, namespace="mine")[1] == ["computed"]
    other.flush()
    third = remote_runner(model, kind, service(secret=secret), store=tmp_path / "disk")
    got, found = logits_behind(third, MANUAL, namespace="tenant")
    assert found == ["disk"]
    assert torch.equal(got, wanted)
    assert other.tiers.stats()["troubles"] == third.tiers.stats()["troubles"] == {}


@pytest.mark.parametrize("sights", [None, SIGHTS])
def test_a_document_of_several_formats_is_read_as_it_is_packed(
    uneven: Any, service: Callable[..., RemoteStore], sights: Any
) -> None:
    first = strategy_runner(uneven, service(), sights=sights)
    first.insert(DOC, "long")
    first.flush()
    assert len(text_of(first).parts) > 1
    wanted = logits_behind(first, DOC)[0]
    other = strategy_runner(uneven, service(), sights=sights)
    got, found = logits_behind(other, DOC)
    assert found == ["remote"]
    assert same(got, wanted)
    assert text_of(other).nbytes == text_of(first).nbytes
    assert other.tiers.stats()["troubles"] == {}


def test_other_formats_and_strategies_find_nothing(model: Any, uneven: Any, tmp_path: Path) -> None:
    for kind in ("int4", "half-int4"):
        first = remote_runner(model, kind, folder_store(tmp_path / "packed"))
        first.insert(MANUAL, "manual")
        first.flush()
    for kind in ("int8", "planes-3"):
        other = remote_runner(model, kind, folder_store(tmp_path / "packed"))
        assert logits_behind(other, MANUAL)[1] == ["computed"]
    exact = remote_runner(model, "int4", folder_store(tmp_path / "packed"), kv_dtype=None)
    assert logits_behind(exact, MANUAL)[1] == ["computed"]
    one = strategy_runner(uneven, folder_store(tmp_path / "final"))
    one.insert(DOC, "long")
    one.flush()
    for bound, found in ((0.13, "remote"), (0.14, "computed")):
        other = strategy_runner(uneven, folder_store(tmp_path / "final"), bound)
        assert logits_behind(other, DOC)[1] == [found]


@pytest.mark.parametrize("part", ["bases", "which", "pages"])
def test_parts_that_cannot_be_are_refused_and_computed(
    model: Any, tmp_path: Path, part: str
) -> None:
    """Checksums anybody can make: an object that is sound and says what cannot be."""
    made = folder_store(tmp_path / "made")
    first = remote_runner(model, "half-int4", made)
    first.insert(MANUAL, "manual")
    first.flush()
    wanted = logits_behind(first, MANUAL)[0]
    (of,) = [one.provenance for one in made.list()]
    assert of is not None
    held = made.get(of, np.asarray(MANUAL))
    assert held is not None
    parts = {name: held.read(name) for name in held.parts if name != "tokens"}
    spoiled = {
        "bases": np.full(len(parts["bases"]) // 4, np.nan, np.float32).tobytes(),
        "which": np.full(len(parts["which"]) // 4, 9999, np.int32).tobytes(),
        "pages": parts["pages"][:-1],
    }
    lies = folder_store(tmp_path / "lies")
    lies.put(of, np.asarray(MANUAL), {**parts, part: spoiled[part]})
    other = remote_runner(model, "half-int4", lies)
    with pytest.warns(StoreDegraded, match="remote store"):
        got, found = logits_behind(other, MANUAL)
    assert found == ["computed"]
    assert got.shape == wanted.shape
    assert bool(got.isfinite().all())
    assert set(other.tiers.stats()["troubles"]) == {"remote refused"}


def test_what_is_larger_than_such_a_document_can_be_is_not_read(
    model: Any, uneven: Any, tmp_path: Path
) -> None:
    """And what is as large as it is can be is: in any format, final or not."""
    for kind in KINDS:
        first = remote_runner(model, kind, folder_store(tmp_path / kind))
        first.insert(MANUAL, "manual")
        first.flush()
        most = first.tiers._form.most_bytes(len(MANUAL)) + 4 * len(MANUAL) + (1 << 20)
        held = shard_in(tmp_path / kind)
        assert held.stat().st_size <= most
        with held.open("ab") as file:
            file.truncate(most + 1)
        other = remote_runner(model, kind, folder_store(tmp_path / kind))
        with pytest.warns(StoreDegraded, match=f"expected 4096 to {most} bytes"):
            assert logits_behind(other, MANUAL)[1] == ["computed"]
    one = strategy_runner(uneven, folder_store(tmp_path / "final"))
    one.insert(DOC, "long")
    one.flush()
    parts = one.tiers._form.export(text_of(one).held).parts
    assert sum(part.nbytes for part in parts.values()) <= one.tiers._form.most_bytes(len(DOC))


def test_pages_of_a_version_that_is_not_known_are_not_found(
    model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    first = remote_runner(model, "half-int4", folder_store(tmp_path))
    first.insert(MANUAL, "manual")
    first.flush()
    monkeypatch.setattr("kvweave.runner.tiers.packed_form.VERSION", 2)
    other = remote_runner(model, "half-int4", folder_store(tmp_path))
    assert logits_behind(other, MANUAL)[1] == ["computed"]
    assert other.tiers.stats()["troubles"] == {}


def test_a_format_of_the_callers_own_is_told_from_the_named_one(model: Any, tmp_path: Path) -> None:
    """Groups of two are another layout, though pages have fewer bytes alone."""
    first = remote_runner(model, "quarter-bf16", folder_store(tmp_path))
    first.insert(MANUAL, "manual")
    first.flush()
    of = ops.PackedFormat("top-r", 16, kept=4, group=2, numbers="bf16")
    packing = replace(random_packing("quarter-bf16", 4, 16)[0], format=of)
    other = remote_runner(model, "quarter-bf16", folder_store(tmp_path), kv_dtype=packing)
    assert logits_behind(other, MANUAL)[1] == ["computed"]
