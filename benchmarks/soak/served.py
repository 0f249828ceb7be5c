"""The runners of a soak: a tiny random Llama as a kind asks for it, and a quiet twin beside each.

Both live as long as the soak, so that what one of them leaks adds up; they are loaded in turns.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.soak.asked import NAMESPACES, VOCABULARY
from benchmarks.soak.kinds import CLASSES, HEAD_DIM, KV_HEADS, LAYERS, Heads, Kind
from benchmarks.soak.words import word_tokenizer
from kvweave import HeadClassMap, Runner, Store
from kvweave.cache import KvCache
from kvweave.remote import RemoteStore

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 16384,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
QUIET_TOKENS = 4096
TOO_MANY = 12_800
"""Tokens that no runner of these holds, whatever its windows spare."""
ENGINE: dict[str, Any] = {"token_budget": 160, "chunk_tokens": 96, "max_running": 8}


class Served:
    """A runner of a kind with a store in a folder, and one without tiers that is always quiet."""

    def __init__(self, kind: Kind, model: Any, folder: Path, remote: RemoteStore) -> None:
        self.kind = kind
        self._model, self._remote = model, remote
        self._tokenizer = self.tokenizer()
        self.folder = folder / re.sub(r"\W+", "-", kind.name)
        self.runner = self.another()
        quiet: dict[str, Any] = {"max_tokens": QUIET_TOKENS}
        self.twin = self._made(kind.twin_heads or kind.heads, **quiet)

    @staticmethod
    def tokenizer() -> Any:
        """That of all of them."""
        return word_tokenizer(VOCABULARY)

    def another(self) -> Runner:
        """One more runner of the same folder, as after a restart."""
        kind, room = self.kind, self.kind.room
        how: dict[str, Any] = {"hash": "sha256", "max_tokens": room.device, **kind.how}
        if kind.has_tiers:
            limits = {"capacity_bytes": self.bytes_of(room.stored)}
            limits["quota_bytes"] = self.bytes_of(room.stored_quota)
            how["store"] = Store(self.folder, hash="sha256", eviction="cost-aware", **limits)
            how["document_bytes"] = self.bytes_of(room.document)
            if "remote" not in kind.without:
                how["remote"] = self._remote
        runner = self._made(kind.heads, **how)
        for space in NAMESPACES:
            books_of(runner).set_quota(space, blocks=quota_of(runner, room.frozen_quota))
        return runner

    def bytes_of(self, tokens: int) -> int:
        """What so many tokens of documents take in a tier."""
        return tokens * self.kind.token_bytes

    def counts(self) -> dict[str, int]:
        """What the runner has counted since it was made, by what a soak calls it."""
        pools, packing = self.runner.host.values(), self.runner.packing_stats()
        found = {"times that host memory was taken": sum(p.stats()["requests"] for p in pools)}
        found["blocks copied to host memory"] = sum(pool.transfers.copied for pool in pools)
        found["documents packed finally"] = packing.get("final", 0)
        found["documents left as they were packed"] = packing.get("kept", 0)
        return found

    def _made(self, heads: Heads | None, **how: Any) -> Runner:
        known: dict[str, Any] = {"check": False, "progress": False, **self.kind.shared}
        if heads is not None:
            known["heads"] = _map_of(self._model, heads)
        return Runner(self._model, self._tokenizer, **known, **how)


def books_of(runner: Runner) -> KvCache:
    """The cache whose blocks documents are frozen in."""
    return runner.cache if runner.packed is None else runner.packed.cache


def quota_of(runner: Runner, tokens: int) -> int:
    """Blocks of each head group that so many tokens of documents take."""
    return tokens // books_of(runner).shape.page_tokens


def tiny_llama() -> Any:
    """The random model of a soak, f32 on the CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def _map_of(model: Any, classes: Heads) -> HeadClassMap:
    """A map of these classes."""
    fingerprint = Runner(model, max_tokens=64, check=False, progress=False).spec.fingerprint
    heads = []
    for layer, names in enumerate(classes):
        for head, name in enumerate(names):
            reach = "local" if name == "window" else "global"
            stability = "unstable" if name == "unstable" else "stable"
            said = {"class": CLASSES[name], "reach": reach, "stability": stability}
            heads.append({"layer": layer, "head": head, **said})
    known = {"schema_version": 1, "model_fingerprint": fingerprint, "layers": LAYERS}
    return HeadClassMap.from_json(json.dumps({**known, "kv_heads": KV_HEADS, "heads": heads}))
