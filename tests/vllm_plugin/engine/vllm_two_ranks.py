"""Parts of the plugin on two ranks, of tensor parallelism mostly: a program that prints JSON lines.

Its arguments are a part, and `ray` where Ray shall start the ranks: each is then on a node of its
own. `attended`: the attention backend alone, `stages`: the same by two stages of pipeline
parallelism, beside an engine of one rank. `mapped`: segments beside a head map; the ranks have
their first whole heads in different layers, and kvweave's Runner stands beside them. `packed`:
segments in packed pages, also from a folder, `pages`: virtual pages, each beside an engine of one
rank. `top_k`: heads that choose pages, `far`: those over virtual pages in the host's memory, each
beside transformers' own decoding. `short`: one of the ranks lacks room for what is
found. `drafted`: on a GPU, drafts whose steps become a graph, likewise. Scheduler, workers and
front are processes of their own.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import vllm_cpu_ops
import vllm_ray

# This process, and what it starts.
if __name__ in ("__main__", "__mp_main__") and os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
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


def kept_documents(llm: Any, base: Any, store: Path) -> None:
    """A document comes back from the folder on both ranks; where one cannot read it, on neither."""
    from vllm_segments import Marked, ask, text

    document = tuple(text(100, 9))
    given = Marked([text(20, 1), document, text(15, 2)])
    base.insert("document", document, "kept")
    for number in range(3):
        if number == 2:
            # The largest is the longest document's.
            shards = (store / "rank-1-of-2" / "shards").iterdir()
            path = max(shards, key=lambda shard: shard.stat().st_size)
            data = bytearray(path.read_bytes())
            data[-5000] ^= 1
            path.write_bytes(data)
        said, found = ask(llm, given, policy="naive", namespace="kept"), base.store()
        say(said=said.tokens, first=said.logprobs[0], brought=found["brought_documents"])
        # Another document is frozen in its stead, and two prompts take the room of what is not.
        base.insert(f"other {number}", text(70, 50 + number), "kept")
        for seed in (60, 70):
            ask(llm, Marked([tuple(text(400, seed + number))]), 1, policy="full")


Ranks = dict[str, Any]
"""Options of an engine: who starts its ranks, and how many."""


def say_answers(llm: Any) -> None:
    """What an engine says to prompts in steps that prefill and decode."""
    from vllm_engines import answers, prompt

    found = answers(llm, [prompt(length, length) for length in (5, 40, 100, 33, 1, 250)], 12)
    say(said=[one.tokens for one in found], logprobs=[one.logprobs for one in found])


def attended(folder: Path, ranks: Ranks) -> None:
    """Prompts in mixed steps; and the nodes that the ranks are on, under Ray."""
    from families import tiny
    from vllm_engines import OURS, engine

    # Callables go to workers, who are processes of their own.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    tiny("llama").save_pretrained(folder / "model")
    with engine(folder / "model", OURS, **ranks) as llm:
        say_answers(llm)
        if ranks["distributed_executor_backend"] == "ray":
            say(nodes=llm.collective_rpc(vllm_ray.node))


def with_room(worker: Any) -> None:
    """In a worker: room for what a stage hears of the one before it.

    On CPUs vLLM 0.33 takes it only where it compiles, in the pass that warms a model up.
    """
    worker.model_runner.profile_run()


def stages(folder: Path, ranks: Ranks) -> None:
    """The same prompts by one rank, and by two of which each has half of the layers."""
    from families import tiny
    from vllm_engines import OURS, engine

    # Callables go to workers, who are processes of their own.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    tiny("llama").save_pretrained(folder / "model")
    staged = {**ranks, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    for started in ({}, staged):
        with engine(folder / "model", OURS, **started) as llm:
            llm.collective_rpc(with_room)
            say_answers(llm)


def packed(folder: Path, ranks: Ranks) -> None:
    """Documents of prompts and of a knowledge base, in pages of half-int4; that of the knowledge
    base once more from a folder, in the basis that it has there beside another one.
    """
    from families import tiny
    from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
    from test_segments_packed import ASKED, OF_BASE
    from vllm_engines import engine
    from vllm_segments import SIZES, ask, settings, text

    tiny("llama", **SIZES).save_pretrained(folder / "model")
    kept = {"store": str(folder / "kept"), "store_reads": "always"}
    runs = (({}, {}, 50), (ranks, kept, 50), (ranks, kept, 60))
    for number, (started, stored, seed) in enumerate(runs):
        choice = settings(segment_dtype="half-int4", **stored)
        with engine(folder / "model", choice, max_num_batched_tokens=512, **started) as llm:
            base = KnowledgeBase(llm.collective_rpc)
            for more in range(2):
                base.insert(f"first {more}", text(300, seed + more), "others")
            if number < 2:
                base.insert("one", text(120, 33))
            answers = [ask(llm, given, policy="naive") for given in (*ASKED, OF_BASE)]
            tokens, first = [one.tokens for one in answers], [one.logprobs[0] for one in answers]
            found = base.store()
            brought = found.get("brought_documents"), found.get("brought_refused")
            say(said=tokens, first=first, hits=found["request_hits"], brought=brought)


def pages(folder: Path, ranks: Ranks) -> None:
    """Prompts, twice, so that the second time finds prefixes, under a map whose classes ranks have
    unlike numbers of.
    """
    from families import tiny
    from test_virtual_pages import FULL, PROMPTS, virtual, window, written
    from vllm_engines import answers, engine

    model = tiny("llama")
    model.save_pretrained(folder / "model")
    kinds = [FULL, window(16, 40), window(0, 24)]
    heads, layers = model.config.num_key_value_heads, model.config.num_hidden_layers
    classes = [
        [kinds[(3 * layer + head) % 4 % 3] for head in range(heads)] for layer in range(layers)
    ]
    under = virtual(heads=written(folder, classes))
    for started in ({}, ranks):
        with engine(folder / "model", under, **started) as llm:
            for _ in range(2):
                found = answers(llm, PROMPTS, 12)
                first = [one.logprobs[0] for one in found]
                say(said=[one.tokens for one in found], first=first)


def ranked(folder: Path, ranks: Ranks) -> None:
    """Heads that choose pages, beside vLLM's own blocks, as transformers' own decoding has them."""
    from families import tiny
    from test_head_split import ours
    from test_top_k import CHANGES, FULL, KINDS, PROMPTS, defined, written
    from vllm_engines import answers, engine

    tiny("llama", **CHANGES).save_pretrained(folder / "model")
    with engine(folder / "model", ours(written(folder, KINDS)), **ranks) as llm:
        found = answers(llm, PROMPTS, 20)
    plain = [defined("llama", KINDS, given, 20) for given in PROMPTS]
    dense = [defined("llama", [FULL], given, 20) for given in PROMPTS]
    for some in (found, plain, dense):
        say(said=[one.tokens for one in some], logprobs=[one.logprobs for one in some])


def far(folder: Path, ranks: Ranks) -> None:
    """Pages of heads that choose leave for the host, under a map whose classes ranks have unlike
    numbers of, and as transformers' own decoding has it.
    """
    from families import tiny
    from ranked_pages import FULL, WINDOW, top_k
    from test_pool_metrics import shown
    from test_top_k import CHANGES, defined, written
    from test_virtual_pages import virtual
    from test_virtual_pages_top_k import LONG
    from vllm_engines import answers, engine, metric

    model = tiny("llama", **CHANGES)
    model.save_pretrained(folder / "model")
    deal = [top_k(4, 16), FULL, top_k(4, 16), WINDOW, top_k(6, 16)]
    under = virtual(heads=written(folder, deal))
    under["additional_config"]["kvweave"]["host_bytes"] = 64 << 20
    under["enable_prefix_caching"] = False
    with engine(folder / "model", under, **ranks, num_gpu_blocks_override=110) as llm:
        found = answers(llm, LONG, 40)
        left, preempted = shown("spilled_bytes_total"), metric(llm, "num_preemptions")
        said, first = [one.tokens for one in found], [one.logprobs[0] for one in found]
        say(said=said, first=first, left=left, preempted=preempted)
    plain = [defined("llama", deal, given, 40, paced=True) for given in LONG]
    say(said=[one.tokens for one in plain], first=[one.logprobs[0] for one in plain])


def mapped(folder: Path, ranks: Ranks) -> None:
    """A document at two places, a knowledge base, markers that are malformed, and a folder."""
    from families import tiny
    from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
    from test_segments_heads import CHANGES, SEVERAL, Mapped
    from vllm_engines import engine, sampling
    from vllm_segments import FIRST, SECOND, ask, text

    tiny("llama", **CHANGES).save_pretrained(folder / "model")
    beside = Mapped(folder, SEVERAL)
    choice = beside.settings()
    # A rank has half of each layer's heads: a block of the store is 32 KiB.
    ours = {
        "store": str(folder / "kept"),
        "store_reads": "always",
        "segment_bytes": 42 << 15,
        "frozen_share": 0.2,
    }
    choice["additional_config"]["kvweave"] |= ours
    with engine(folder / "model", choice, max_num_batched_tokens=512, **ranks) as llm:
        for policy in ("sparsex", "foresight"):
            for given in (FIRST, SECOND):
                wanted = beside.beside.ask(given, policy, namespace=policy)
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
        kept_documents(llm, base, folder / "kept")


def without_room(_: Any, short: int) -> None:
    """In a worker: on one rank the device has no room for the next prompt that is looked up."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvweave.errors import OutOfMemory

    store = get_kv_transfer_group().worker.store
    admit = store.admit

    def once(*_asked: Any) -> Any:
        store.admit = admit
        raise OutOfMemory("look-up: expected room for tables, got none")

    if get_tensor_model_parallel_rank() == short:
        store.admit = once


def short(folder: Path, ranks: Ranks) -> None:
    """A prompt whose document is known, for which one rank has no room; then once more."""
    from families import tiny
    from vllm_engines import engine
    from vllm_segments import FIRST, SECOND, SIZES, ask, settings

    # Callables go to workers, who are processes of their own.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    tiny("llama", **SIZES).save_pretrained(folder / "model")
    options = {"max_num_batched_tokens": 512, "enable_prefix_caching": False, **ranks}
    with engine(folder / "model", settings(), **options) as llm:
        alone = ask(llm, SECOND, policy="full", namespace="alone")
        say(said=alone.tokens, first=alone.logprobs[0])
        for number in range(2):
            ask(llm, FIRST, policy="full", namespace=str(number))
            for fails in (True, False):
                if fails:
                    llm.collective_rpc(without_room, args=(number,))
                got = ask(llm, SECOND, policy="sparsex", namespace=str(number))
                say(said=got.tokens, first=got.logprobs[0])


def graphs_made(_: Any) -> int:
    """In a worker: how many graphs of drafts it has."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    made = get_kv_transfer_group().worker.drafts.made
    return sum(one.graph is not None for one in made.values())


def drafted(folder: Path, ranks: Ranks) -> None:
    """A prompt whose document is known, four times: with a draft of eight tokens each."""
    from families import tiny
    from test_gpu import MEMORY, MODES
    from vllm_engines import engine
    from vllm_segments import FIRST, SECOND, SIZES, ask, settings

    # Callables go to workers, who are processes of their own.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    tiny("llama", **SIZES).save_pretrained(folder / "model")
    options = {**MEMORY, **MODES["graphs"], "max_num_batched_tokens": 512}
    policy = {"name": "foresight", "share": 0.3, "draft": 8}
    for started in ({}, ranks):
        with engine(folder / "model", settings(), **options, **started) as llm:
            tokens, first = [], []
            for number in range(4):
                ask(llm, FIRST, policy="full", namespace=str(number))
                said = ask(llm, SECOND, policy=policy, namespace=str(number))
                tokens.append(said.tokens)
                first.append(said.logprobs[0])
            say(said=tokens, first=first, graphs=llm.collective_rpc(graphs_made))


PARTS = {
    "attended": attended,
    "stages": stages,
    "mapped": mapped,
    "packed": packed,
    "pages": pages,
    "top_k": ranked,
    "far": far,
    "short": short,
    "drafted": drafted,
}


def main(part: str, executor: str = "mp") -> None:
    """Runs a part."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    ranks = {"distributed_executor_backend": executor, "tensor_parallel_size": 2}
    with TemporaryDirectory() as made, vllm_ray.nodes() if executor == "ray" else nullcontext():
        PARTS[part](Path(made), ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
