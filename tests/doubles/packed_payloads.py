"""A payload with packed pages, documents, tokens aside and bases, and a runner that takes it."""

from __future__ import annotations

import numpy as np

from document_decoding import documents, fresh, insert_all
from families import tiny
from head_maps import class_map
from kvweave.payload import KvPayload
from kvweave.runner import Runner
from packed_decoding import packed_runner
from page_meaning import random_packing

SIGHTS = np.array([[[100, 20], [0, 0]]], np.int32)


def packed_sample(name: str = "planes-3") -> tuple[Runner, KvPayload]:
    """Of 334 tokens, of which 180 are of two documents; one head of two has a window."""
    sizes = {"head_dim": 64, "max_position_embeddings": 4096, "num_hidden_layers": 1}
    model = tiny("llama", **sizes)
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    packing, _ = random_packing(name, 2, 64)
    heads = class_map(SIGHTS, plain.spec.fingerprint)
    given = {"kv_dtype": packing, "heads": heads, "max_tokens": 2048}
    here, there = (packed_runner(model, **given) for _ in range(2))
    docs = documents([129, 51])
    insert_all(here, docs)
    prompt = [fresh(70, 1), docs[0], fresh(5, 2), docs[1], fresh(79, 3)]
    with here.prefill(prompt, "naive") as done:
        return there, KvPayload.from_bytes(here.export(done).to_bytes())
