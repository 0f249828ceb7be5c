"""What reads documents of any origin: head maps, payloads, profiles, shards, marks of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from kvweave import HeadClassMap, KvCache, KvShape, Provenance, Store, ops
from kvweave.adapters.vllm.checkpoint import FLOATS, StoredTensors
from kvweave.adapters.vllm.segments.markers import parse
from kvweave.adapters.vllm.server import marks
from kvweave.payload import KvPayload, export_kv
from kvweave.payload.formats import FormatRanks, TextFormats
from kvweave.payload.page_format import PageFormat
from kvweave.policies.policy_profile import PolicyProfile
from kvweave.runner.tiers.final_form import formats_in, part_of_formats
from kvweave.weight_sample import WeightComparison, places, samples_of
from packed_decoding import nothing_is_held
from packed_payloads import packed_sample
from payloads import PayloadFile
from policy_profiles import profile

HEADS = """{"schema_version": 1, "model_fingerprint": "m", "layers": 2, "kv_heads": 2, "heads": [
 {"layer": 0, "head": 0, "class": {"kind": "full"}, "reach": "global", "stability": "stable"},
 {"layer": 0, "head": 1, "class": {"kind": "window", "sink": 16, "recent": 256}, "reach": "local",
  "stability": "stable"},
 {"layer": 1, "head": 0, "class": {"kind": "top_k", "pages": 32, "rerank_every": 16},
  "reach": "global", "stability": "unstable"},
 {"layer": 1, "head": 1, "class": {"kind": "window", "sink": 4, "recent": 64}, "reach": "local",
  "stability": "stable"}]}"""
WEIGHTS = """{"embed_tokens.weight": {"dtype": "bf16", "shape": [300, 64],
 "values": [0.0123, -1.5e-3]}, "norm.weight": {"dtype": "f32", "shape": [64], "values": [1.0]}}"""
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
        """What is taken may be compared with a model."""
        heads = HeadClassMap.from_json(data.decode("utf-8", "surrogateescape"))
        assert samples_of(HeadClassMap.from_json(heads.to_json())) == samples_of(heads)
        compared = WeightComparison(samples_of(heads))
        for sample in samples_of(heads):
            assert compared.sample(sample.name) is not None or "model." in sample.name
            compared.see(sample, sample.dtype, sample.shape, lambda _, own=sample: own.values)
        return compared.told()

    named = f'{HEADS[:-1]}, "weights": {WEIGHTS}}}'
    return Target("head map", [HEADS.encode(), named.encode()], read)


def checkpoint(folder: Path) -> Target:
    """The header of a file of weights, and elements of whatever it says to have."""
    path = folder / "model.safetensors"
    tensors = {"norm.weight": torch.ones(8), "q.weight": torch.ones(4, 4, dtype=torch.bfloat16)}
    save_file({**tensors, "packed": torch.zeros(3, dtype=torch.int8)}, path)
    document = path.read_bytes()

    def read(data: bytes) -> object:
        path.write_bytes(data)
        found = StoredTensors.of(path)
        for tensor in found.by_name.values():
            if tensor.dtype in FLOATS:
                found.floats(tensor, places(tensor.shape, 2))
        return found

    return Target("checkpoint", [document], read)


def payload(_: Path) -> Target:
    cache = KvCache(KvShape(2, 2, 16), blocks=4)
    tokens = np.arange(3, dtype=np.int32)
    with cache.admit(tokens, reuse="none") as request:
        pages = torch.from_dlpack(cache.arena)
        pages.fill_(0.5)
        sent = export_kv(cache, pages, request, logits=torch.arange(8.0))
    return Target("payload", [sent.to_bytes()], KvPayload.from_bytes)


def packed_payload(_: Path) -> Target:
    """The numbers and the header of a payload with packed pages, under checksums that are right.

    What is taken is decoded from.
    """
    runner, sent = packed_sample(head_dim=16)
    file = PayloadFile(sent)
    names = ("packed.entries", "packed.aside_entries", "packed.which")
    numbers = b"".join(sent.parts[name].numpy().tobytes() for name in names)
    document = numbers + json.dumps(sent.header.to_json()).encode()

    def read(data: bytes) -> object:
        at = 0
        for name in names:
            size = sent.parts[name].nbytes
            file.write(name, data[at : at + size].ljust(size, b"\0"))
            at += size
        header = data[at:].decode("utf-8", "replace").rstrip()
        if header.endswith("}"):
            # A mapping gets the checksums as its last field, which counts; other texts stay none.
            fields = header[:-1].rstrip()
            comma = "" if fields.endswith("{") else ","
            header = f'{fields}{comma}"crc32":{json.dumps(file.sums)}}}'
        payload = KvPayload.from_bytes(file.sealed(header))
        try:
            return runner.resume(payload, max_new_tokens=2, stop=())
        finally:
            assert nothing_is_held(runner)

    return Target("packed payload", [document], read)


def formats_of_a_document(_: Path) -> Target:
    """Which formats a document in a shard says that its pages have; what is taken has all pages."""
    known = ops.top_r_candidates(32)[:4]
    listed = tuple(
        FormatRanks(PageFormat.of(of), ranks)
        for of, ranks in zip(known, ((1, 3), (0,), (2,)), strict=False)
    )

    def read(data: bytes) -> object:
        part = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        header = formats_in(part, 4, 32, known)
        ranks = sorted(rank for each in header.formats for rank in each.ranks)
        assert ranks in ([], [0, 1, 2, 3])
        assert header.most_lost >= 0.0
        assert 0 <= header.over_bound <= 4
        return part_of_formats(header)

    headers = TextFormats(listed, 0.25, 1), TextFormats(listed, np.inf, 4), TextFormats()
    return Target("formats", [part_of_formats(each).numpy().tobytes() for each in headers], read)


def policy_profile(_: Path) -> Target:
    def read(data: bytes) -> object:
        return PolicyProfile.from_json(data.decode("utf-8", "surrogateescape")).to_json()

    heads = HeadClassMap.from_json(HEADS)
    mapped = profile("weave", heads.model_fingerprint, heads)
    texts = (profile("foresight:share=0.07:draft=4"), mapped, profile("full"))
    return Target("profile", [one.to_json().encode() for one in texts], read)


def shard(folder: Path) -> Target:
    """A file in the place of a shard, looked up, read and verified."""
    store = Store(folder / "kv", direct=False)
    of = Provenance("model", dtype="f32", layout="bytes", layers=2, kv_heads=3, head_dim=8)
    tokens = np.arange(40, dtype=np.int32)
    name, _ = store.put(of, tokens, {"kv": bytes(range(256)), "none": b""})
    path = folder / "kv" / "shards" / f"{name}.kv"
    document = path.read_bytes()
    file = path.open("r+b", buffering=0)

    def read(data: bytes) -> object:
        # Into the same file: opening one to be written anew takes longer than all the rest.
        file.seek(0)
        file.write(data)
        file.truncate()
        found = store.shard(name)
        for part in found.parts:
            found.read(part)
        return found.tokens()

    return Target("shard", [document], read)


def marks_of_a_request(_: Path) -> Target:
    """The marks of a request, as text and as what a server has read of it."""

    def read(data: bytes) -> object:
        text = data.decode("utf-8", "replace")
        given = _json(text)
        return parse(text) if given is None else parse(given)

    return Target("marks", [json.dumps(each).encode() for each in MARKS], read)


def marks_of_a_chat(_: Path) -> Target:
    """A chat that has marks in its messages. What is no JSON never comes so far."""

    def read(data: bytes) -> object:
        given = _json(data.decode("utf-8", "replace"))
        return marks.read(given) if isinstance(given, dict) else None

    return Target("chat", [json.dumps(CHAT).encode()], read)


def _json(text: str) -> Any:
    """What a text says; None where it is no JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


TARGETS = {
    "head_map": head_map,
    "checkpoint": checkpoint,
    "payload": payload,
    "packed_payload": packed_payload,
    "formats": formats_of_a_document,
    "profile": policy_profile,
    "shard": shard,
    "marks": marks_of_a_request,
    "chat": marks_of_a_chat,
}
