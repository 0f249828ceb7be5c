"""The first answers of a vLLM that starts again, from documents on disk, on one GPU (vLLM 0.33).

`python -m benchmarks.vllm.restart FOLDER [stock|kept|tier|fs] … [--json FILE]` prints one JSON
object a line. Random weights of a known shape. Each engine is started twice in processes of its
own: the first computes `documents` of `tokens` and has them kept on the disk of FOLDER, the second
is asked about some of them, each for the first time. `stock` keeps nothing and computes them;
`kept` has them in its knowledge base, marked behind fresh text; `tier` and `fs` are vLLM's own
offloading, with our store and with its `fs` tier on disk, where a document begins the prompt.
FILE is a part of a run for `python -m benchmarks.report.record FILE…`.

Where FOLDER's file system takes no direct reads, all are from the page cache: `reads` says so.
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
from typing import Any

import numpy as np

from benchmarks.device.models import MODELS
from benchmarks.report.record import of_device
from benchmarks.vllm.engine import DECODE_GRAPHS
from benchmarks.vllm.found import lines, say
from benchmarks.vllm.model import written
from kvweave.adapters.vllm.serving import engine_options, offloading_options
from kvweave.lab.bench.rows import Row

ENGINES = ("stock", "kept", "tier", "fs")
PHASES = ("first", "again")
NAMES = {
    "stock": "stock, computed",
    "kept": "segments, from the knowledge base's folder",
    "tier": "vLLM's offloading, from our store",
    "fs": "vLLM's offloading, from its fs tier",
}
CASE, MILLI, GIB = "vllm_restart", 1e3, 2**30
BEFORE, BEHIND = 64, 64
"""Fresh tokens before a marked document, and behind any."""
PATIENCE_S = 300


def options(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """What an engine is told to keep documents with."""
    folder, host = str(given.folder / name), int(given.host * GIB)
    if name == "kept":
        architecture = f"{MODELS[given.model][0]}ForCausalLM"
        return engine_options(architecture, segment_bytes=int(given.arena * GIB), store=folder)
    if name == "stock":
        return {}
    asked = offloading_options(folder, host, chunk_tokens=given.chunk)
    if name == "fs":
        extra = asked["kv_transfer_config"]["kv_connector_extra_config"]
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": folder}]
        stock = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        return {"kv_transfer_config": {**stock, "kv_connector_extra_config": extra}}
    return asked


def engine(name: str, model: Path, given: argparse.Namespace) -> Any:
    """A vLLM that computes a whole prompt in one step, decode graphs on."""
    from vllm import LLM

    longest = given.tokens + BEFORE + BEHIND + 16
    return LLM(
        str(model),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        block_size=16,
        max_model_len=longest,
        max_num_seqs=4,
        max_num_batched_tokens=longest,
        compilation_config={**DECODE_GRAPHS, "cudagraph_capture_sizes": [1]},
        enable_prefix_caching=True,
        disable_log_stats=False,
        **options(name, given),
    )


def text(seed: int, length: int, vocabulary: int) -> list[int]:
    """Random tokens, the same in every process."""
    return [int(t) for t in np.random.default_rng(seed).integers(1, vocabulary, length)]


class Asked:
    """An engine and its documents; prompts are made where they are asked."""

    def __init__(self, name: str, llm: Any, given: argparse.Namespace, vocabulary: int) -> None:
        self.name, self.llm, self.given, self.vocabulary = name, llm, given, vocabulary

    def document(self, number: int) -> list[int]:
        """Tokens of a document."""
        return text(number, self.given.tokens, self.vocabulary)

    def first_token(self, document: list[int], seed: int) -> float:
        """Seconds to the first token of a prompt about a document."""
        from vllm import SamplingParams

        before = text(10**6 + seed, BEFORE, self.vocabulary) if self.name == "kept" else []
        ids = before + document + text(2 * 10**6 + seed, BEHIND, self.vocabulary)
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        if self.name == "kept":
            span = [len(before), len(before) + len(document)]
            params.extra_args = {"kvweave": {"segments": [span], "policy": self.given.policy}}
        start = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return time.perf_counter() - start

    def keep(self) -> None:
        """Computes every document once, and returns when the disk has them all."""
        from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase

        for number in range(self.given.documents):
            if self.name == "kept":
                base = KnowledgeBase(self.llm.collective_rpc)
                entry = base.insert(f"document {number}", self.document(number))
                if not entry["kept"]:
                    raise RuntimeError(f"document {number}: {entry['not_kept']}")
            else:
                self.first_token(self.document(number), number)
        self.settle()

    def settle(self) -> None:
        """Steps until vLLM's offloading carries nothing more."""
        core = self.llm.llm_engine.engine_core.engine_core
        connector = core.scheduler.connector
        end = time.monotonic() + PATIENCE_S
        while self.name in ("tier", "fs") and connector.has_pending_push_work():
            if time.monotonic() > end:
                raise RuntimeError(f"{self.name}: expected transfers to end in {PATIENCE_S} s")
            core.step()
            time.sleep(0.001)

    def counted(self) -> dict[str, Any]:
        """What came from the disk, by the engine's own counts."""
        if self.name == "kept":
            from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase

            found = KnowledgeBase(self.llm.collective_rpc).store()
            return {key: found[key] for key in ("brought_documents", "brought_tokens")}
        names = ("kv_offload_kvweave_reads", "kv_offload_tiering_read_bytes")
        metrics = [m for m in self.llm.get_metrics() if m.name.removeprefix("vllm:") in names]
        found = {}
        for metric in metrics:
            path = metric.labels.get("path", "")
            found[f"{metric.name.rpartition('_')[2]} {path}".strip()] = metric.value
        return found


def measure(name: str, phase: str, given: argparse.Namespace) -> None:
    """One start of one engine."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    folder = given.folder / "model"
    folder.mkdir(parents=True, exist_ok=True)
    model, _ = written(folder, given.model, given.layers)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    start = time.perf_counter()
    asked = Asked(name, engine(name, model, given), given, vocabulary)
    say(name, phase=phase, what="start", seconds=time.perf_counter() - start)
    # What is compiled or captured on the way is not measured.
    for seed in range(2):
        asked.first_token(text(10**7 + seed, given.tokens, vocabulary), seed)
    if phase == "first":
        start = time.perf_counter()
        asked.keep()
        say(
            name,
            phase=phase,
            what="kept",
            seconds=time.perf_counter() - start,
            documents=given.documents,
        )
        return
    asked.settle()
    before = asked.counted()
    numbers = np.random.default_rng(0).permutation(given.documents)[: given.rounds].tolist()
    times = [asked.first_token(asked.document(number), number) for number in numbers]
    say(
        name,
        phase=phase,
        what="ttft",
        seconds=statistics.median(times),
        most=max(times),
        rounds=len(times),
    )
    asked.settle()
    now = asked.counted()
    say(name, phase=phase, what="reads", **{key: now[key] - before.get(key, 0) for key in now})


def rows_of(found: list[dict[str, Any]], documents: int, tokens: int) -> list[Row]:
    """A row for each engine's first answers, with its ratio to stock's, which computes."""
    lines = {line["engine"]: line for line in found if line["what"] == "ttft"}
    reads = {line["engine"]: line for line in found if line["what"] == "reads"}
    rows = []
    for name, line in lines.items():
        beside: dict[str, Any] = {"documents": documents}
        if name != "stock" and "stock" in lines:
            beside["÷ stock"] = round(line["seconds"] / lines["stock"]["seconds"], 4)
        named = ("engine", "phase", "what")
        beside |= {k: v for k, v in reads.get(name, {}).items() if k not in named}
        title = f"TTFT after a restart, a document of {tokens} tokens: {NAMES[name]}"
        value, most = (round(line[key] * MILLI, 1) for key in ("seconds", "most"))
        rows.append(Row(title, value, "ms", most, beside))
    return rows


def parser_of_words() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm.restart", description=__doc__)
    parser.add_argument("folder", type=Path, help="where documents are kept; empty or not there")
    parser.add_argument("engines", nargs="*", default=list(ENGINES), help=" or ".join(ENGINES))
    parser.add_argument("--model", default="Llama-3.1-8B")
    parser.add_argument("--layers", type=int, default=0, help="0: all of the model's")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=8, help="documents that are asked about")
    parser.add_argument("--policy", default="naive", help="of the engine kept")
    parser.add_argument("--arena", type=float, default=4, help="GiB of segments on the GPU")
    parser.add_argument("--host", type=float, default=4, help="GiB of vLLM's offloading")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a chunk of offloading")
    parser.add_argument("--json", type=Path, help="where the run goes, after every engine")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    return parser


def main(words: list[str]) -> int:
    """Each engine twice, in processes of its own."""
    parser = parser_of_words()
    given = parser.parse_args(words)
    unknown = set(given.engines) - set(ENGINES)
    if unknown:
        parser.error(f"engines: expected {' or '.join(ENGINES)}, got {', '.join(unknown)}")
    if given.child:
        measure(given.child, given.phase, given)
        return 0
    sizes = ("model", "layers", "documents", "tokens", "rounds", "policy", "arena", "host", "chunk")
    settings = [str(given.folder), *(f"--{name}={getattr(given, name)}" for name in sizes)]
    found: list[dict[str, Any]] = []
    failed = False
    for name in given.engines:
        try:
            for phase in PHASES[name == "stock" :]:
                words = [*settings, "--phase", phase, "--child", name]
                found.extend(lines("benchmarks.vllm.restart", words))
        except subprocess.CalledProcessError as error:
            failed = True
            print(error, file=sys.stderr, flush=True)
        rows = rows_of(found, given.documents, given.tokens)
        if given.json:
            given.json.write_text(json.dumps(of_device(CASE, rows), indent=1) + "\n")
    for row in rows_of(found, given.documents, given.tokens):
        print(f"{row.name}: {row.value} {row.unit} {row.of}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
