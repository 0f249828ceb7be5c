"""A knowledge base on two ranks that outlives its engine: a program that prints JSON lines.

`python vllm_restarted_ranks.py FOLDER`: inserts where the folder is empty, and asks in any case.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import vllm_cpu_ops

# This process, and what it starts.
if __name__ in ("__main__", "__mp_main__"):
    vllm_cpu_ops.define()


def say(**found: Any) -> None:
    """One line of results."""
    print(json.dumps(found), flush=True)


def main(folder: Path) -> None:
    """Two documents, marked in one prompt."""
    from families import tiny
    from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
    from vllm_engines import engine
    from vllm_segments import BOTH, DOCUMENT, OTHER, SIZES, ask, settings

    model, store = folder / "model", folder / "store"
    if not model.exists():
        tiny("llama", **SIZES).save_pretrained(model)
    new = not store.exists()
    ranks = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    choice = settings(store=str(store))
    with engine(model, choice, max_num_batched_tokens=512, **ranks) as llm:
        base = KnowledgeBase(llm.collective_rpc)
        for name, tokens in (("a", DOCUMENT), ("b", OTHER)):
            if new:
                assert base.insert(name, tokens)["kept"]
        say(entries=[[entry["name"], entry["kept"]] for entry in base.entries()])
        said = ask(llm, BOTH, policy="naive")
        say(tokens=said.tokens, first=said.logprobs[0], store=base.store())


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    main(Path(sys.argv[1]))
