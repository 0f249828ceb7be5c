"""Time to first token of a RAG prompt in vLLM, with segments reused and without.

`python -m benchmarks.vllm.segments [stock|segments|mapped|packed] … [--ranks 2] [--json FILE]`
prints one JSON object a line. Random weights of a known shape. Of every prompt 97 % are documents
that an earlier prompt had in another order, between fresh text; stock vLLM has none of it in its
prefix cache. FILE is a run for `python -m benchmarks.report.record FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.device.models import MODELS
from benchmarks.report.record import of_device
from benchmarks.vllm.engine import DECODE_GRAPHS
from benchmarks.vllm.found import lines, say
from benchmarks.vllm.model import MAPPED, PACKED, options_named, written
from kvweave.lab.bench.rows import Row

ENGINES = ("stock", "segments")
EVERY = (*ENGINES, MAPPED, PACKED)
POLICIES: dict[str, Any] = {
    "full": "full",
    "naive": "naive",
    "sparsex": "sparsex",
    "sparsex-0": {"name": "sparsex", "boundary": 0, "top_k": 0.05},
    "foresight-0": {"name": "foresight", "share": 0.1, "draft": 0},
    "foresight": {"name": "foresight", "share": 0.1},
    "foresight-4x2": {"name": "foresight", "share": 0.1, "draft": 2, "drafts": 4},
}
NAMES = {
    "stock": "stock",
    "full": "segments, policy full",
    "naive": "segments, naive",
    "sparsex": "segments, sparsex",
    "sparsex-0": "segments, sparsex, ℓ* = 0, 5 % by score",
    "foresight-0": "segments, foresight, 10 %, no draft",
    "foresight": "segments, foresight, 10 %, a draft of 8",
    "foresight-4x2": "segments, foresight, 10 %, 4 drafts of 2",
}
NAMES |= {f"{MAPPED} {kind}": f"{NAMES[kind]}, one head in eight whole" for kind in POLICIES}
NAMES |= {f"{PACKED} {kind}": f"{NAMES[kind]}, stored in INT4" for kind in POLICIES}
"""What a record calls them."""
CASE = "vllm_segments"
MILLI = 1e3
ROUNDS = 8


class Prompts:
    """Prompts of `documents` of equal length with fresh text before each and behind the last."""

    def __init__(self, tokens: int, documents: int, share: float, vocabulary: int) -> None:
        self.numbers = np.random.default_rng(0)
        self.vocabulary = vocabulary
        length = int(tokens * share) // documents
        self.documents = [self.text(length) for _ in range(documents)]
        self.fresh = (tokens - documents * length) // (documents + 1)

    def text(self, length: int) -> list[int]:
        """Random tokens."""
        return [int(token) for token in self.numbers.integers(1, self.vocabulary, length)]

    def next(self) -> tuple[list[int], list[list[int]]]:
        """The documents in an order of their own: tokens, and the documents' spans."""
        ids, spans = self.text(self.fresh), []
        for number in self.numbers.permutation(len(self.documents)):
            spans.append([len(ids), len(ids) + len(self.documents[number])])
            ids += self.documents[number] + self.text(self.fresh)
        return ids, spans


def engine(name: str, model: Path, given: argparse.Namespace, heads: Path | None = None) -> Any:
    """A vLLM that computes a whole prompt in one step, decode graphs on."""
    from vllm import LLM

    longest = given.tokens + 64
    graphs = {**DECODE_GRAPHS, "cudagraph_capture_sizes": [1]}
    architecture = f"{MODELS[given.model][0]}ForCausalLM"
    reusing = options_named(name, architecture, heads, given.arena << 30)
    return LLM(
        str(model),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=4,
        max_num_batched_tokens=longest,
        compilation_config=graphs,
        enable_prefix_caching=True,
        tensor_parallel_size=given.ranks,
        **{"block_size": 16, **reusing},
    )


def measure(name: str, given: argparse.Namespace) -> None:
    """One engine: a prompt that brings the documents in, then rounds of each policy."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import SamplingParams

    with TemporaryDirectory() as folder:
        model, heads = written(Path(folder), given.model, given.layers)
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        llm = engine(name, model, given, heads)
        prompts = Prompts(given.tokens, given.documents, given.share, vocabulary)

        def first_token(markers: dict[str, Any] | None) -> float:
            ids, spans = prompts.next()
            params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
            if markers is not None:
                params.extra_args = {"kvweave": {"segments": spans, **markers}}
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            return time.perf_counter() - start

        kinds: dict[str, Any] = {"stock": None}
        if name != "stock":
            prefix = f"{name} " if name in (MAPPED, PACKED) else ""
            kinds = {f"{prefix}{kind}": policy for kind, policy in POLICIES.items()}
            say(name, what="first", seconds=first_token({"policy": "full"}))
        for kind, policy in kinds.items():
            markers = None if policy is None else {"policy": policy}
            times = [first_token(markers) for _ in range(ROUNDS)]
            middle = statistics.median(times[1:])
            say(name, what=kind, seconds=middle, least=min(times), most=max(times[1:]))
        if name != "stock" and given.ranks == 1:
            say(name, what="store", **counted())


def counted() -> dict[str, Any]:
    """Look-ups of the store since the engine started, whose only rank is this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    found = connector.worker.store.cache.stats()
    return {key: found[key] for key in ("requests", "tokens", "request_hits", "held", "cached")}


def rows_of(found: list[dict[str, Any]], tokens: int, share: float) -> list[Row]:
    """A row for stock and for each policy, with its ratio to stock's."""
    seconds = {line["what"]: line["seconds"] for line in found if line["what"] in NAMES}
    rows = []
    for line in found:
        kind = line["what"]
        if kind not in seconds:
            continue
        name = f"TTFT, {tokens} tokens, {100 * share:.0f} % in documents seen before: {NAMES[kind]}"
        beside = {}
        if kind != "stock" and "stock" in seconds:
            beside = {"÷ stock": round(seconds[kind] / seconds["stock"], 4)}
        value, most = (round(line[key] * MILLI, 1) for key in ("seconds", "most"))
        rows.append(Row(name, value, "ms", most, beside))
    return rows


def main(words: list[str]) -> int:
    """Each engine in a process of its own, so that one leaves no memory taken."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm.segments", description=__doc__)
    parser.add_argument("engines", nargs="*", default=list(ENGINES), help=" or ".join(EVERY))
    parser.add_argument("--model", default="Llama-3.1-8B")
    parser.add_argument("--layers", type=int, default=0, help="0: all of the model's")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.97)
    parser.add_argument("--arena", type=int, default=12, help="GiB of a rank's store")
    parser.add_argument("--ranks", type=int, default=1, help="of tensor parallelism")
    parser.add_argument("--json", type=Path, help="where the run goes, after every engine")
    parser.add_argument("--child", choices=EVERY, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    unknown = set(given.engines) - set(EVERY)
    if unknown:
        parser.error(f"engines: expected {' or '.join(EVERY)}, got {', '.join(unknown)}")
    if given.child:
        measure(given.child, given)
        return 0
    kept = ("model", "layers", "tokens", "documents", "share", "arena", "ranks")
    settings = [f"--{name}={getattr(given, name)}" for name in kept]
    found: list[dict[str, Any]] = []
    failed = False
    for name in given.engines:
        try:
            found.extend(lines("benchmarks.vllm.segments", [*settings, "--child", name]))
        except subprocess.CalledProcessError as error:
            failed = True
            print(error, file=sys.stderr, flush=True)
        if given.json:
            case = CASE if given.ranks == 1 else f"{CASE}_ranks"
            run = of_device(case, rows_of(found, given.tokens, given.share))
            given.json.write_text(json.dumps(run, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
