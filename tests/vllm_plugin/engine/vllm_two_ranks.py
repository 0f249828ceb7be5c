"""Segments on two ranks of tensor parallelism: a program that prints JSON lines.

Scheduler, workers and front are processes of their own; kvweave's Runner stands beside them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import vllm_cpu_ops

# This process, and what it starts.
if __name__ in ("__main__", "__mp_main__"):
    vllm_cpu_ops.define()


def say(**found: Any) -> None:
    """One line of results."""
    print(json.dumps(found), flush=True)


def tried(action: Any) -> list[str]:
    """The error of ours that an action raises: its class and text."""
    from vllm.exceptions import VLLMValidationError

    from kvweave.errors import KvweaveError
    from vllm_engines import ours

    try:
        action()
    except (KvweaveError, VLLMValidationError) as error:
        return [type(ours(error)).__name__, str(error)]
    return []


def main() -> None:
    """A document at two places, a knowledge base, and markers that are malformed."""
    from families import tiny
    from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
    from vllm_engines import engine, sampling
    from vllm_segments import SIZES, Counterpart, Marked, ask, settings, text

    document = tuple(text(100, 9))
    prompts = [Marked([text(20, 1), document, text(15, 2)])]
    prompts += [Marked([text(37, 3), document, text(21, 4)])]
    beside = Counterpart(tiny("llama", **SIZES))
    changes = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    with TemporaryDirectory() as folder:
        tiny("llama", **SIZES).save_pretrained(Path(folder))
        with engine(Path(folder), settings(), max_num_batched_tokens=512, **changes) as llm:
            for policy in ("sparsex", "foresight"):
                for given in prompts:
                    wanted = beside.ask(given, policy, namespace=policy)
                    got = ask(llm, given, policy=policy, namespace=policy)
                    apart = abs(got.logprobs[0] - wanted.logprobs[0])
                    say(got=got.tokens, wanted=wanted.tokens, apart=apart)
            base = KnowledgeBase(llm.collective_rpc)
            base.insert("handbook", text(90, 77), "acme")
            say(store=base.store(), names=[entry["name"] for entry in base.entries()])
            say(error=tried(lambda: base.delete("other", "acme")))
            params = sampling(3)
            params.extra_args = {"kvweave": {"segments": 3}}
            say(error=tried(lambda: llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)))
            say(alive=len(ask(llm, prompts[0]).tokens))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    main()
