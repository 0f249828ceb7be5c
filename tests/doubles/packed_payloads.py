"""A payload with packed pages, documents, tokens aside, bases and bounds, and who takes it."""

from __future__ import annotations

from document_decoding import documents, fresh, insert_all
from families import tiny
from kvweave.payload import KvPayload
from kvweave.runner import Runner
from packed_decoding import packed_runner
from page_meaning import random_packing
from ranked_pages import kinds_map, top_k

KINDS = [{"kind": "window", "sink": 20, "recent": 100}, top_k(3, 2)]


def packed_sample(name: str = "planes-3", head_dim: int = 64) -> tuple[Runner, KvPayload]:
    """Of 334 tokens, 180 of them of two documents; one head has a window, the other chooses."""
    sizes = {"head_dim": head_dim, "max_position_embeddings": 4096, "num_hidden_layers": 1}
    model = tiny("llama", **sizes)
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    packing, _ = random_packing(name, 2, head_dim)
    heads = kinds_map(plain.spec, KINDS)
    given = {"kv_dtype": packing, "heads": heads, "max_tokens": 2048}
    here, there = (packed_runner(model, **given) for _ in range(2))
    docs = documents([129, 51])
    insert_all(here, docs)
    prompt = [fresh(70, 1), docs[0], fresh(5, 2), docs[1], fresh(79, 3)]
    with here.prefill(prompt, "naive") as done:
        return there, KvPayload.from_bytes(here.export(done).to_bytes())
