"""Whether one tenant of a vLLM can tell from the time to his first token what another has cached.

`python -m benchmarks.vllm.isolation [KIND…] [--server] [--trials N] [--text TOKENS] [--json FILE]`,
on a CPU or a GPU: what `benchmarks.cases.isolation` asks of a `Runner`. `prompts` are whole ones in
vLLM's own prefix cache, which tenants keep apart by their `cache_salt`; `documents` marked ones in
the store of segments, which they keep apart by their `namespace`. `host` and `disk` (0.33) are
prompts that have left the device and lie in vLLM's offloading, in the host's memory and in our
store behind it.

An engine in this process is asked or, with `--server` (0.33), vLLM's OpenAI server over HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cases.isolation import CONTROLS
from benchmarks.classifier import row
from benchmarks.vllm import device
from benchmarks.vllm.engine import DECODE_GRAPHS
from benchmarks.vllm.isolation_asked import TIERS, Asked, EngineAsked, ServerAsked
from benchmarks.vllm.server import MIDDLEWARE, served, words_of
from benchmarks.vllm.soak_engine import ARCHITECTURE, SHAPE, written
from kvweave.adapters.vllm.serving import engine_options, offloading_options
from kvweave.lab.bench.rows import Row

CASE, TRIALS, TEXT = "vllm_isolation", 10_000, 512
STORE_BYTES, KV_BYTES = 64 << 20, 512 << 20
BLOCK, BESIDE = 32, 128
"""Tokens of a block of vLLM's, and of a request beside its text at most."""
HOST_TEXTS = 16
"""Texts that the host's memory has room for."""
TOKEN_BYTES = 2 * 4 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
KINDS = ("prompts", "documents", *TIERS)
DEV_MODE = "VLLM_SERVER_DEV_MODE"
"""Of a server whose caches may be reset."""
LIMIT_S = 600


def options(kind: str, text: int, folder: Path) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for an engine that computes a prompt in one step."""
    longest = text + BESIDE
    gpu = {"compilation_config": DECODE_GRAPHS, "gpu_memory_utilization": 0.1}
    # Several engines may start on a GPU at once: none looks at how much memory is free.
    gpu |= {"kv_cache_memory_bytes": KV_BYTES}
    given = {
        "dtype": "float32",
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "max_num_seqs": 4,
        "seed": 0,
        "distributed_executor_backend": "uni",
        **device.options(**gpu),
    }
    if kind not in TIERS:
        return {**given, **engine_options(ARCHITECTURE, segment_bytes=STORE_BYTES)}
    size = HOST_TEXTS * text * TOKEN_BYTES
    tiers = offloading_options(str(folder / kind), size, capacity_bytes=STORE_BYTES)
    return {**given, "block_size": BLOCK, **device.offloading(tiers)}


@contextmanager
def started(kind: str, text: int, model: Path, *, server: bool) -> Iterator[Asked]:
    """An engine, or a server of one, that is asked for texts of one kind and length."""
    given = options(kind, text, model.parent)
    if server:
        told = {"enable_prompt_tokens_details": True, "disable_uvicorn_access_log": True}
        words = words_of({"model": str(model), **given, **told})
        with served([*words, *MIDDLEWARE], LIMIT_S) as port:
            yield ServerAsked(kind, text, str(model), port)
        return
    with device.in_process(str(model), **given) as llm:
        yield EngineAsked(kind, text, llm)


def measured(kinds: Sequence[str], trials: int, text: int, *, server: bool) -> Iterator[Row]:
    """What a classifier tells, and the same of what is no secret."""
    device.prepare()
    os.environ[DEV_MODE] = "1"
    of = "vLLM's server" if server else "vLLM"
    with TemporaryDirectory() as folder:
        model = written(Path(folder))
        for kind in kinds:
            with started(kind, text, model, server=server) as asked:
                others = asked.trials(trials, "a")
                yield row(f"{of}, {kind}: what another has cached", others)
                own = asked.trials(min(trials, CONTROLS), "b")
                yield row(f"{of}, {kind}: what he has cached himself", own)


def case_of(kinds: Sequence[str], *, server: bool) -> str:
    """What a record calls a run: those of tiers alone, and those of a server, are cases apart."""
    return CASE + "_server" * server + "_tiers" * (set(kinds) <= set(TIERS))


def main(words: Sequence[str] | None = None) -> None:
    """Measures and prints; FILE is a run for `python -m benchmarks.report.record FILE…`."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm.isolation", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--server", action="store_true", help="asked over HTTP")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--text", type=int, default=TEXT, help="tokens of each")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    kinds = given.kinds or KINDS[:2]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"KIND: expected some of {', '.join(KINDS)}, got {', '.join(unknown)}")
    rows = []
    for each in measured(kinds, given.trials, given.text, server=given.server):
        rows.append(each)
        print(each.name, f"{each.value:.4f}", each.of, flush=True)
    if given.json is not None:
        run = device.run_of(case_of(kinds, server=given.server), rows)
        given.json.write_text(json.dumps(run))


if __name__ == "__main__":
    main()
