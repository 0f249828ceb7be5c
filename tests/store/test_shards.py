"""The store as Python has it: buffers, times, documents, and errors by their class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import (
    CorruptShard,
    ForeignShard,
    InvalidArgument,
    KvweaveError,
    Provenance,
    QuotaExceeded,
    Store,
    StoreFull,
    StoreUnavailable,
    UnknownShard,
)
from versions import needs_cuda

TOKENS = np.arange(5, dtype=np.int32)


def of(**other: Any) -> Provenance:
    fields = {"dtype": "f32", "layout": "bytes", "layers": 2, "kv_heads": 3, "head_dim": 8}
    return Provenance("model", **{**fields, **other})


def file_of(path: Path, name: str) -> Path:
    return path / "shards" / f"{name}.kv"


def test_buffers_of_any_kind_come_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "kv")
    kv = torch.randn(3, 2, 700, 8)
    parts = {
        "bytes": b"abc",
        "none": b"",
        "kv": kv,
        "bf16": kv.bfloat16(),
        "f16": kv.half(),
        "ids": np.arange(10, dtype=np.int64),
        "raw": np.frombuffer(bytearray(b"xyz"), np.uint8),
    }
    name, written = store.put(of(), TOKENS, parts)
    assert written
    assert store.put(of(), torch.from_numpy(TOKENS), parts) == (name, False)
    shard = store.get(of(), TOKENS.astype(np.int64))
    assert shard is not None
    assert shard.provenance == of()
    assert list(shard.parts) == ["tokens", *parts]
    assert shard.tokens().tolist() == TOKENS.tolist()
    assert shard.read("bytes") == b"abc"
    assert shard.read("none") == b""
    assert shard.read("raw") == b"xyz"
    back = torch.empty_like(kv)
    assert shard.read_into("kv", back) in ("direct", "bounced", "refused")
    assert torch.equal(back, kv)
    half = torch.empty_like(kv, dtype=torch.bfloat16)
    shard.read_into("bf16", half)
    assert torch.equal(half, kv.bfloat16())
    assert np.frombuffer(shard.read("f16"), np.float16).tolist() == kv.half().flatten().tolist()
    assert store.held() == (shard.file_bytes, {"": shard.file_bytes})
    assert Store(tmp_path / "kv", direct=False).get(of(), TOKENS).read("kv") == kv.numpy().tobytes()


def test_errors_are_told_by_their_class(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    store = Store(path)
    name, _ = store.put(of(namespace="a"), TOKENS, {"kv": bytes(9000)})
    for wrong, kind in (
        (lambda: Store(path, hash="sha256"), InvalidArgument),
        (lambda: Store(path, hash="md5"), InvalidArgument),
        (lambda: Store(path, quota_bytes=-1), InvalidArgument),
        (lambda: Store(tmp_path / "none", create=False), UnknownShard),
        (lambda: store.shard("../../etc/passwd"), InvalidArgument),
        (lambda: store.shard("x" * 10_000_000), InvalidArgument),
        (lambda: store.shard("0" * 32), UnknownShard),
        (lambda: store.verify("0" * 32), UnknownShard),
        (lambda: store.name("a", "n/" * 5_000_000, name), InvalidArgument),
        (lambda: store.name("b", "taken", name), ForeignShard),
        (lambda: store.put(of(), TOKENS, {"tokens": b""}), InvalidArgument),
        (lambda: store.put(of(), TOKENS, {"kv": kv_of_strides()}), InvalidArgument),
        (lambda: store.put(of(), TOKENS, {"kv": "text"}), InvalidArgument),
        (lambda: store.put(of(), TOKENS, {"kv": b""}, now=-1), InvalidArgument),
        (lambda: store.put(of(), TOKENS - 1, {"kv": b""}), InvalidArgument),
        (lambda: store.put(of(), TOKENS[:0], {"kv": b""}), InvalidArgument),
        (lambda: store.import_shard(tmp_path / "none"), StoreUnavailable),
        (lambda: of(dtype="f64"), InvalidArgument),
        (lambda: of(layers=0), InvalidArgument),
        (lambda: of(namespace="\ud800"), InvalidArgument),
        (lambda: of(namespace="x" * 10_000_000), InvalidArgument),
        (lambda: of(namespace="a").expect(of(namespace="b")), ForeignShard),
    ):
        with pytest.raises(kind) as caught:
            wrong()
        assert isinstance(caught.value, KvweaveError)
        assert len(str(caught.value)) < 2000
    shard = store.shard(name)
    with pytest.raises(UnknownShard):
        shard.read("other")
    with pytest.raises(InvalidArgument, match="9000 bytes"):
        shard.read_into("kv", torch.empty(10))
    fixed = np.zeros(9000, np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(InvalidArgument, match="writable"):
        shard.read_into("kv", fixed)
    with open(file_of(path, name), "r+b") as file:
        file.seek(8192)
        file.write(b"\1")
    with pytest.raises(CorruptShard, match="part kv"):
        shard.read("kv")
    assert store.list()[0].error is not None
    assert store.put(of(namespace="a"), TOKENS, {"kv": bytes(9000)}) == (name, True)
    os.truncate(file_of(path, name), 5000)
    with pytest.raises(CorruptShard, match="5000 bytes"):
        store.get(of(namespace="a"), TOKENS)
    assert store.collect()["spoiled"] == 1
    assert store.get(of(namespace="a"), TOKENS) is None


def kv_of_strides() -> torch.Tensor:
    return torch.zeros(4, 4).T[:, :2]


def test_budgets_and_times(tmp_path: Path) -> None:
    store = Store(tmp_path / "kv", capacity_bytes=10 * 4096, quota_bytes=3 * 4096)
    store.put(of(namespace="a"), TOKENS, {"kv": b"x"}, now=1)
    with pytest.raises(QuotaExceeded):
        store.put(of(namespace="a"), TOKENS + 1, {"kv": bytes(5000)}, now=2)
    assert store.contains(of(namespace="a"), TOKENS)
    store.set_quota("b", bytes=2**40)
    with pytest.raises(StoreFull):
        store.put(of(namespace="b"), TOKENS, {"kv": bytes(2**20)})
    store.put(of(namespace="a"), TOKENS + 2, {"kv": b"x"}, expires=50, now=3)
    assert not store.contains(of(namespace="a"), TOKENS, now=4), "evicted for the newer"
    assert store.get(of(namespace="a"), TOKENS + 2, now=49) is not None
    assert store.get(of(namespace="a"), TOKENS + 2, now=50) is None
    assert store.collect(now=50)["expired"] == 1


def test_documents_are_found_after_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path / "kv", hash="sha256")
    name, _ = store.put(of(namespace="a"), TOKENS, {"kv": b"x"})
    assert len(name) == 64
    store.name("a", "manual", name)
    again = Store(tmp_path / "kv")
    assert again.hash == "sha256"
    found = again.document("manual", "a")
    assert found is not None
    assert (found.name, found.read("kv")) == (name, b"x")
    assert again.document("manual") is None
    assert again.documents() == [("a", "manual", name)]
    with pytest.raises(InvalidArgument, match="no document names"):
        again.delete(name)
    # What another has changed is seen without being asked for.
    assert store.forget("manual", "a")
    assert again.document("manual", "a") is None
    assert again.delete(name)
    assert store.list() == []


@needs_cuda
def test_tensors_of_a_gpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="on cpu"):
        Store(tmp_path / "kv").put(of(), TOKENS, {"kv": torch.zeros(4, device="cuda")})


@settings(max_examples=60)
@given(
    namespace=st.text(st.characters(codec="utf-8"), max_size=20),
    name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40),
    data=st.binary(max_size=5000),
    regime=st.integers(0, 2**64 - 1),
)
def test_whatever_it_is_called(
    tmp_path_factory: pytest.TempPathFactory,
    namespace: str,
    name: str,
    tokens: list[int],
    data: bytes,
    regime: int,
) -> None:
    path = tmp_path_factory.mktemp("called")
    of_it = of(namespace=namespace, regime=regime)
    store = Store(path)
    shard, _ = store.put(of_it, np.asarray(tokens, np.int32), {"kv": data}, expires=2**62)
    store.name(namespace, name, shard)
    found = Store(path).document(name, namespace)
    assert found is not None
    assert found.read("kv") == data
    assert found.tokens().tolist() == tokens
    assert found.provenance == of_it
