"""vLLM's own benchmarks, stock and with the plugin: `python -m benchmarks.vllm.vllm_bench`.

`serve` is `vllm bench serve` against a server of each engine, of its data set `prefix_repetition`
and of a load of retrieved documents (`rag_text`) in its `custom` format; `throughput` is
`vllm bench throughput`. Engines are `stock`, `ours` (its model on our backend), `heads` (an eighth
of global KV heads) and `segments` (documents found wherever they stand). Weights are random, at a
known shape. Where they are asked for: `mapped` (segments beside those heads) and `packed` (segments
in INT4 pages). FILE gets a run for `python -m benchmarks.report.record FILE`, whose case follows
from the jobs: the load of documents is a case apart from vLLM's own data sets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.device.models import MODELS
from benchmarks.vllm import device
from benchmarks.vllm.model import MAPPED, PACKED, options_named, written
from benchmarks.vllm.rag_text import RagLoad, write_custom, write_tokenizer
from benchmarks.vllm.server import MIDDLEWARE, samples, served, words_of
from kvweave.errors import InvalidArgument
from kvweave.lab.bench.rows import Row

ENGINES = ("stock", "ours", "heads", "segments")
EVERY = (*ENGINES, MAPPED, PACKED)
REUSING = ("segments", MAPPED, PACKED)
JOBS = ("prefix_repetition", "rag", "throughput")
DISCOVER = {"kvweave": {"discover": True}}
SERVE = {
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "total_token_throughput": "tokens/s",
    "mean_ttft_ms": "ms",
    "p99_ttft_ms": "ms",
    "mean_tpot_ms": "ms",
    "p99_tpot_ms": "ms",
}
PROMPTS, REUSED = "kvweave_prompt_tokens_total", "kvweave_reused_tokens_total"
"""Of prompts that may reuse some: their tokens, and those that came from the store."""
THROUGHPUT = {"requests_per_second": "requests/s", "tokens_per_second": "tokens/s"}


def case_of(jobs: Sequence[str], ranks: int) -> str:
    """What a record calls a run.

    Raises InvalidArgument for the load of documents beside other jobs, and for those over ranks.
    """
    if set(jobs) == {"rag"}:
        return "vllm_bench" if ranks == 1 else "vllm_bench_ranks"
    if "rag" not in jobs and ranks == 1:
        return "vllm_bench_own"
    expected = "rag alone, or other jobs of one rank"
    got = f"{', '.join(jobs)} of {ranks}"
    text = f"json: expected a run that has a record, of {expected}, got {got}"
    raise InvalidArgument(text, expected=expected, got=got)


def options_of(engine: str, architecture: str, heads: Path, store: int) -> list[str]:
    """Words of the command line that make a server of vLLM the engine."""
    return words_of(options_named(engine, architecture, heads, store))


def told(command: str, words: list[str], result: Path, limit_s: float) -> dict[str, Any]:
    """What one of vLLM's benchmarks writes into `result`; what it prints goes to stderr."""
    run = [sys.executable, "-m", "benchmarks.vllm.vllm_command", command, *words]
    subprocess.run(run, stdout=sys.stderr, check=True, timeout=limit_s)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def bench_words(job: str, engine: str, folder: Path, chosen: argparse.Namespace) -> list[str]:
    """Words of `vllm bench serve` for a job."""
    words = ["--model", str(folder), "--backend", "openai-chat", "--ignore-eos"]
    words += ["--endpoint", "/v1/chat/completions", "--request-rate", str(chosen.rate)]
    words += ["--percentile-metrics", "ttft,tpot", "--metric-percentiles", "99"]
    words += ["--num-prompts", str(chosen.requests), "--seed", "0"]
    if job == "rag":
        words += ["--dataset-name", "custom", "--dataset-path", str(folder / "rag.jsonl")]
        words += ["--skip-chat-template", "--custom-output-len", str(chosen.answer)]
    else:
        sizes = {"prefix-len": chosen.prefix, "suffix-len": chosen.suffix, "num-prefixes": 8}
        words += ["--dataset-name", job]
        for name, value in {**sizes, "output-len": chosen.answer}.items():
            words += [f"--prefix-repetition-{name}", str(value)]
    if engine in REUSING:
        words += ["--extra-body", json.dumps(DISCOVER)]
    return words


def counted(port: int) -> Counter[str]:
    """What a server's metrics say by now, of all labels together."""
    sums: Counter[str] = Counter()
    for sample in samples(port):
        sums[sample.name] += sample.value
    return sums


def figures(job: str, engine: str, found: dict[str, Any], of: Counter[str]) -> list[Row]:
    """A row for each figure, beside how much of the prompts was reused, as metrics `of` it say."""
    units = THROUGHPUT if job == "throughput" else SERVE
    failed = found.get("failed", 0)
    beside = {"failed": failed} if failed else {}
    if of[PROMPTS]:
        beside["reused"] = round(of[REUSED] / of[PROMPTS], 4)
    return [
        Row(f"{job}, {name}: {engine}", round(float(found[name]), 4), unit, None, dict(beside))
        for name, unit in units.items()
        if name in found
    ]


def beside_stock(rows: list[Row]) -> list[Row]:
    """The same rows with their ratios to stock's."""
    stock = {row.name.rpartition(": ")[0]: row.value for row in rows if row.name.endswith("stock")}
    made = []
    for row in rows:
        title, _, engine = row.name.rpartition(": ")
        of = dict(row.of)
        if engine != "stock" and stock.get(title):
            of = {"÷ stock": round(row.value / stock[title], 4), **of}
        made.append(Row(row.name, row.value, row.unit, row.p95, of))
    return made


def run_engine(
    engine: str, folder: Path, heads: Path, chosen: argparse.Namespace
) -> Iterator[list[Row]]:
    """The chosen jobs of one engine, a list of rows each as soon as it is known."""
    architecture = f"{MODELS[chosen.model][0]}ForCausalLM"
    ours = options_of(engine, architecture, heads, int(chosen.store_gib * 2**30))
    engine_words = ["--model", str(folder), "--load-format", "dummy", "--dtype", chosen.dtype]
    engine_words += ["--max-model-len", str(chosen.longest), *words_of(device.options())]
    engine_words += [*ours, *chosen.others]
    if chosen.ranks > 1:
        engine_words += ["--tensor-parallel-size", str(chosen.ranks)]
    if engine in REUSING:
        engine_words += ["--max-num-batched-tokens", str(chosen.chunk or chosen.longest)]
    serving = [job for job in chosen.jobs if job != "throughput"]
    if serving:
        words = [*engine_words, *(MIDDLEWARE if engine in REUSING else [])]
        with served(words, chosen.limit) as port:
            for job in serving:
                result = folder / f"{job}-{engine}.json"
                asked = bench_words(job, engine, folder, chosen)
                asked += ["--port", str(port), "--save-result"]
                asked += ["--result-dir", str(folder), "--result-filename", result.name]
                before = counted(port)
                found = told("serve", asked, result, chosen.limit)
                after = counted(port)
                after.subtract(before)
                yield figures(job, engine, found, after)
    if "throughput" in chosen.jobs and engine not in REUSING:
        result = folder / f"throughput-{engine}.json"
        asked = [*engine_words, "--output-json", str(result), "--dataset-name", "random"]
        asked += ["--input-len", str(chosen.prefix), "--output-len", str(chosen.answer)]
        asked += ["--num-prompts", str(chosen.requests)]
        found = told("throughput", asked, result, chosen.limit)
        yield figures("throughput", engine, found, Counter())


def parser_of_words() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm.vllm_bench", description=__doc__)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--engines", nargs="+", choices=EVERY, default=list(ENGINES))
    parser.add_argument("--model", choices=list(MODELS), default="Llama-3.1-8B")
    parser.add_argument("--layers", type=int, default=0, help="0: all of the model's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ranks", type=int, default=1, help="of tensor parallelism")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, Poisson")
    parser.add_argument("--prefix", type=int, default=8192)
    parser.add_argument("--suffix", type=int, default=256)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--longest", type=int, default=110_000, help="tokens of a request")
    chunk = "most tokens of a step that may reuse some; 0: of a whole request"
    parser.add_argument("--chunk", type=int, default=0, help=chunk)
    parser.add_argument("--store-gib", type=float, default=16.0)
    parser.add_argument("--rag", type=json.loads, default={}, help="fields of a RagLoad, JSON")
    parser.add_argument("--limit", type=float, default=540, help="seconds a process may take")
    parser.add_argument("--json", type=Path, help="where the run goes")
    parser.add_argument("others", nargs="*", help="behind --: options of vLLM, of every engine")
    return parser


def main(words: list[str] | None = None) -> int:
    """Runs the chosen jobs; returns the exit status, 1 when an engine failed."""
    parser = parser_of_words()
    chosen = parser.parse_args(words)
    try:
        case = case_of(chosen.jobs, chosen.ranks) if chosen.json else ""
    except InvalidArgument as error:
        parser.error(str(error))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows: list[Row] = []
    failed = False
    with TemporaryDirectory() as made:
        folder, heads = written(Path(made), chosen.model, chosen.layers)
        vocabulary = int(MODELS[chosen.model][1]["vocab_size"])
        write_tokenizer(folder, vocabulary)
        load = {"requests": chosen.requests, "answer_tokens": chosen.answer, **chosen.rag}
        load = {name: tuple(v) if isinstance(v, list) else v for name, v in load.items()}
        write_custom(folder / "rag.jsonl", RagLoad(**load), vocabulary)
        for engine in chosen.engines:
            try:
                for found in run_engine(engine, folder, heads, chosen):
                    rows += found
                    print(*found, sep="\n", flush=True)
                    if chosen.json:
                        run = device.run_of(case, beside_stock(rows))
                        chosen.json.write_text(json.dumps(run, indent=1) + "\n")
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                print(f"{engine}: {error}", file=sys.stderr, flush=True)
                failed = True
    for row in beside_stock(rows):
        beside = ", ".join(f"{name} {value}" for name, value in row.of.items())
        print(f"{row.name}: {row.value:.4g} {row.unit}; {beside}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
