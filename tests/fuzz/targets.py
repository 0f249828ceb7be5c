"""What reads documents of any origin: a head map, a payload, a profile, a shard, marks of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvweave import HeadClassMap, KvPayload, Provenance, Store
from kvweave.adapters.vllm.segments.markers import parse
from kvweave.adapters.vllm.server import marks
from kvweave.policies.policy_profile import PolicyProfile
from payloads import sample
from policy_profiles import profile

HEADS = """{"schema_version": 1, "model": "m", "layers": 2, "kv_heads": 2, "heads": [
 {"layer": 0, "head": 0, "class": {"kind": "full"}},
 {"layer": 0, "head": 1, "class": {"kind": "window", "sink": 16, "recent": 256}},
 {"layer": 1, "head": 0, "class": {"kind": "top_k", "pages": 32, "rerank_every": 16}},
 {"layer": 1, "head": 1, "class": {"kind": "window", "sink": 4, "recent": 64}}]}"""
MARKS: tuple[dict[str, Any], ...] = (
    {"segments": [[0, 4], [6, 90, "manual"]], "namespace": "acme", "discover": True},
    {"policy": {"name": "sparsex", "boundary": 0, "top_k": 0.05}, "segments": [[3, 7]]},
    {"policy": {"name": "weave", "foresight": {"share": 0.1}, "redknot": {"recent_n": 4}}},
)
PART = {"type": "text", "text": "A contract.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [PART, {**PART, "kvweave": {"name": "a", "policy": "naive"}}]},
    ],
    "kvweave": {"namespace": "acme", "policy": "naive"},
    "vllm_xargs": {"other": 1},
}


@dataclass(frozen=True)
class Target:
    """A reader, documents that it takes, and what it does with one of them.

    Only errors of ours may come out of it.
    """

    name: str
    documents: list[bytes]
    read: Callable[[bytes], object]


def head_map(_: Path) -> Target:
    def read(data: bytes) -> object:
        return HeadClassMap.from_json(data.decode("utf-8", "surrogateescape")).to_json()

    return Target("head map", [HEADS.encode()], read)


def payload(_: Path) -> Target:
    return Target("payload", [sample().to_bytes()], KvPayload.from_bytes)


def policy_profile(_: Path) -> Target:
    def read(data: bytes) -> object:
        return PolicyProfile.from_json(data.decode("utf-8", "surrogateescape")).to_json()

    texts = (profile("foresight:share=0.07:draft=4"), profile("weave"), profile("full"))
    return Target("profile", [one.to_json().encode() for one in texts], read)


def shard(folder: Path) -> Target:
    """A file in the place of a shard, looked up, read and verified."""
    store = Store(folder / "kv")
    of = Provenance("model", dtype="f32", layout="bytes", layers=2, kv_heads=3, head_dim=8)
    tokens = np.arange(40, dtype=np.int32)
    name, _ = store.put(of, tokens, {"kv": bytes(range(256)) * 8, "none": b""})
    path = folder / "kv" / "shards" / f"{name}.kv"
    document = path.read_bytes()

    def read(data: bytes) -> object:
        path.write_bytes(data)
        found = store.shard(name)
        for part in found.parts:
            found.read(part)
        return found.tokens()

    return Target("shard", [document], read)


def marks_of_a_request(_: Path) -> Target:
    """What a client's JSON says, as it stands in a request and as a text in one."""
    documents = [json.dumps(each).encode() for each in (*MARKS, CHAT)]

    def read(data: bytes) -> object:
        text = data.decode("utf-8", "replace")
        # What is no JSON never comes so far: the server has read it.
        with suppress(ValueError, RecursionError):
            given = json.loads(text)
            if isinstance(given, dict):
                return parse(given), marks.read(given)
        return parse(text)

    return Target("marks", documents, read)


TARGETS = {
    "head_map": head_map,
    "payload": payload,
    "profile": policy_profile,
    "shard": shard,
    "marks": marks_of_a_request,
}
