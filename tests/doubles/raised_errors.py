"""Calls that raise or warn of each class of kvweave, as a user would meet it, and small."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvweave
from families import random_tokens, tiny
from kvweave import KvCache, KvShape, Provenance, Runner, Segment, Store, models
from kvweave.adapters.vllm.server.replies import BadRequest
from kvweave.device_memory import needs_memory
from kvweave.lab.bench.rows import expect
from kvweave.lab.eval.corpus import package_folder
from kvweave.payload import KvPayload
from kvweave.policies.policy_profile import PolicyProfile
from kvweave.runner.kv.transfers import Transfers
from kvweave.runner.lossy.canary import Canary

TOKENS = np.arange(40, dtype=np.int32)


def _cache(blocks: int = 8) -> KvCache:
    return KvCache(KvShape(2, 2, 8, 16), blocks=blocks)


def _beyond_a_quota() -> None:
    cache = _cache()
    cache.set_quota("acme", bytes=2 * cache.block_bytes)
    request = cache.admit(TOKENS, namespace="acme")
    request.commit(len(TOKENS), len(TOKENS))
    request.freeze("manual", 0, len(TOKENS))


def _provenance(dtype: str = "f32") -> Provenance:
    return Provenance("model", dtype=dtype, layout="bytes", layers=2, kv_heads=3, head_dim=8)


def _store(**more: Any) -> tuple[Store, Path]:
    folder = Path(tempfile.mkdtemp()) / "kv"
    return Store(folder, **more), folder


def _torn_shard() -> None:
    store, folder = _store()
    name, _ = store.put(_provenance(), TOKENS, {"kv": bytes(9000)})
    os.truncate(folder / "shards" / f"{name}.kv", 5000)
    store.get(_provenance(), TOKENS)


def _anothers_folder() -> None:
    _, folder = _store(model="one")
    Store(folder, model="another")


def _without_memory() -> None:
    def allocate() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    needs_memory("arena")(allocate)()


def _broken_transfer() -> None:
    def broken() -> None:
        raise RuntimeError("the bus is gone")

    Transfers().make("pages", broken)


def _runner(**more: Any) -> Runner:
    return Runner(tiny("llama", num_hidden_layers=2), max_tokens=512, progress=False, **more)


def _before_its_end() -> None:
    _runner().engine().submit(random_tokens(20, 1).tolist(), "full", max_new_tokens=4).result()


def _cancelled() -> None:
    engine = _runner().engine()
    request = engine.submit(random_tokens(20, 1).tolist(), "full", max_new_tokens=4)
    engine.cancel(request)
    request.result()


def _beside_a_server() -> None:
    runner = _runner()
    with runner.serve():
        runner.prefill(random_tokens(20, 1).tolist(), "full")


def _other_forward() -> None:
    Runner(tiny("hunyuan"), max_tokens=64)


def _reused(runner: Runner, document: list[int]) -> None:
    """A prompt in which a document stands that was read elsewhere."""
    parts = [random_tokens(40, 2).tolist(), document, random_tokens(8, 3).tolist()]
    runner.prefill([Segment(tokens=part) for part in parts], "naive").release()


def _uncertified() -> None:
    runner, document = _runner(), random_tokens(64, 1).tolist()
    runner.insert(document, "one")
    _reused(runner, document)


def _drifting() -> None:
    runner, document = _runner(canary=Canary(share=1.0, bound=1e-3)), random_tokens(64, 1).tolist()
    runner.insert(document, "one")
    # The cached document holds NaN, as a defect of memory or of an op might leave it.
    runner._prefiller.pages.fill_(torch.nan)
    _reused(runner, document)


def _torn_document() -> None:
    (store, folder), document = _store(), random_tokens(64, 1).tolist()
    _runner().insert(document, "one", store=store)
    for path in (folder / "shards").iterdir():
        os.truncate(path, 5000)
    _runner().insert(document, "one", store=store)


RAISES: dict[str, Callable[[], object]] = {
    "KvweaveError": _before_its_end,
    "InvalidArgument": lambda: KvShape(0, 1, 8, 16),
    "Unsupported": _other_forward,
    "PoolFull": lambda: _cache(4).admit(np.arange(200, dtype=np.int32)),
    "QuotaExceeded": _beyond_a_quota,
    "OutOfMemory": _without_memory,
    "TransferFailed": _broken_transfer,
    "UnknownSegment": lambda: _cache().delete("manual", "acme"),
    "NamespaceConflict": lambda: _cache().admit(TOKENS, segments=[(0, 20, "a"), (0, 20, "b")]),
    "CorruptHeadMap": lambda: kvweave.HeadClassMap.from_json("{"),
    "CorruptPayload": lambda: KvPayload.from_bytes(b"abc"),
    "CorruptProfile": lambda: PolicyProfile.from_json("{}"),
    "CorruptShard": _torn_shard,
    "ForeignShard": lambda: _provenance("bf16").expect(_provenance()),
    "ForeignStore": _anothers_folder,
    "UnknownShard": lambda: _store()[0].shard("ab" * 32),
    "StoreFull": lambda: _store(capacity_bytes=12288)[0].put(
        _provenance(), TOKENS, {"kv": bytes(50_000)}
    ),
    "StoreUnavailable": lambda: _store()[0].import_shard(_store()[1] / "none.kv"),
    "DeviceUnavailable": lambda: models.load("smollm2", device="cuda"),
    "Cancelled": _cancelled,
    "AlreadyStepping": _beside_a_server,
    "ModelUnavailable": lambda: models.load("gpt-17"),
    "TextUnavailable": lambda: package_folder("no-such==1", "no_such_module", "x"),
    "BadRequest": lambda: _raise(BadRequest("messages", "a list", 3)),
    "WrongAnswer": lambda: expect(False, "decode, B=1, 8K: FA3"),
}
"""By class, a call that raises it."""
WARNS: dict[str, Callable[[], object]] = {
    "UncertifiedPolicy": _uncertified,
    "PolicySwitchedOff": _drifting,
    "StoreDegraded": _torn_document,
}
"""By class, a call that warns of it."""


def _raise(error: Exception) -> None:
    raise error
