"""The runners of a soak: a tiny random Llama with tiers, and a quiet twin beside each.

Both live as long as the soak, so that what one of them leaks adds up; they are loaded in turns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak.asked import NAMESPACES, VOCABULARY
from benchmarks.soak.words import word_tokenizer
from kvweave import HeadClassMap, Runner, Store
from kvweave.remote import RemoteStore

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
TOKEN_BYTES = 4 * 2 * 2 * 32 * 4
"""Of the KV of a token: layers, KV heads, K and V, numbers of four bytes."""
ARENA_TOKENS, QUIET_TOKENS = 3200, 4096
TOO_MANY = 4 * ARENA_TOKENS
"""Tokens that no arena of these holds, whatever its windows spare."""
HOST_BYTES = 640 * TOKEN_BYTES
STORE_BYTES, QUOTA_BYTES = 2600 * TOKEN_BYTES, 900 * TOKEN_BYTES
QUOTA_BLOCKS = 32
"""Blocks of each head group that documents of a namespace may pin."""
ENGINE: dict[str, Any] = {"token_budget": 160, "chunk_tokens": 96, "max_running": 8}
WHOLE = (1, 0, 2, 1)
"""KV heads of each layer that keep everything, where the others keep a sink and a window."""
WINDOW = {"sink": 16, "recent": 48}


@dataclass(frozen=True)
class Kind:
    """What a runner of the soak is asked for."""

    name: str
    how: dict[str, Any]
    windows: bool = False


KINDS = (
    Kind("materialise", {"mode": "materialise", "eviction": "cost-aware"}),
    Kind(
        "share, windows, zeroed",
        {"mode": "share", "eviction": "s3-fifo", "zero_on_free": True},
        windows=True,
    ),
)


class Served:
    """A runner of a kind with a store in a folder, and one without tiers that is always quiet."""

    def __init__(self, kind: Kind, model: Any, folder: Path, remote: RemoteStore) -> None:
        self.kind = kind
        self._model, self._remote = model, remote
        self._tokenizer = self.tokenizer()
        self._heads = _windows(model) if kind.windows else None
        self.folder = folder / kind.name.split(",")[0]
        self.runner = self.another()
        mode = kind.how["mode"]
        self.twin = self._made(max_tokens=QUIET_TOKENS, mode=mode)

    @staticmethod
    def tokenizer() -> Any:
        """That of all of them."""
        return word_tokenizer(VOCABULARY)

    def another(self) -> Runner:
        """One more runner of the same folder, as after a restart."""
        limits = {"capacity_bytes": STORE_BYTES, "quota_bytes": QUOTA_BYTES}
        store = Store(self.folder, hash="sha256", eviction="cost-aware", **limits)
        how: dict[str, Any] = {"hash": "sha256", "document_bytes": HOST_BYTES, **self.kind.how}
        runner = self._made(max_tokens=ARENA_TOKENS, store=store, remote=self._remote, **how)
        for space in NAMESPACES:
            runner.cache.set_quota(space, blocks=QUOTA_BLOCKS)
        return runner

    @property
    def is_told(self) -> bool:
        """Whether its cache goes by what `retain` and `demote` say."""
        return self.runner.eviction == "cost-aware"

    @property
    def zeroes(self) -> bool:
        """Whether freed blocks are overwritten."""
        return bool(self.kind.how.get("zero_on_free"))

    def _made(self, **how: Any) -> Runner:
        known = {"heads": self._heads, "check": False, "progress": False}
        return Runner(self._model, self._tokenizer, **known, **how)


def tiny_llama() -> Any:
    """The random model of a soak, f32 on the CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def _windows(model: Any) -> HeadClassMap:
    """A map with uneven layers."""
    fingerprint = Runner(model, max_tokens=64, check=False, progress=False).spec.fingerprint
    layers, kv_heads = SHAPE["num_hidden_layers"], SHAPE["num_key_value_heads"]
    heads = []
    for layer in range(layers):
        for head in range(kv_heads):
            full = head < WHOLE[layer]
            kept = {"kind": "full"} if full else {"kind": "window", **WINDOW}
            reach = "global" if full else "local"
            said = {"class": kept, "reach": reach, "stability": "stable"}
            heads.append({"layer": layer, "head": head, **said})
    known = {"schema_version": 1, "model_fingerprint": fingerprint, "layers": layers}
    return HeadClassMap.from_json(json.dumps({**known, "kv_heads": kv_heads, "heads": heads}))
