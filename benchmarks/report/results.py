"""Writes the newest records into the README, `docs/results.md` and the pages of `docs/papers`.

`python -m benchmarks.report.results`. No figure there is typed by hand. The README has the
headlines, the second a choice of figures and every table, each under the command that prints it
and the machine that measured it; a paper's page has what was measured of its claims.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import demo_table, headlines
from benchmarks.report.budget_tables import budget_tables
from benchmarks.report.commands import COMMANDS, VLLM
from benchmarks.report.papers import CLAIMS, claims
from benchmarks.report.record import RECORDS, ROOT
from benchmarks.report.table_rows import cell, figure, markdown_row
from kvweave.errors import InvalidArgument

README, RESULTS = ROOT / "README.md", ROOT / "docs" / "results.md"
PAPERS = ROOT / "docs" / "papers"

TITLES = {
    "quality": "Nearness to full on held-out text, 4 segments encoded apart, KL in nats a token",
    "ttft": "Time to first token, SmolLM2-135M f32, four documents that are all cached",
    "block_manager": "Block manager, beside quoted figures of vLLM 0.33.0 (not run here)",
    "store": "A store on disk: reading with every check, and opening",
    "isolation": "What a tenant can tell of others from the time to his first token",
    "hand_off": "A prompt that is prefilled by one process and decoded by another",
    "choices": "Documents that are taken from where they come sooner: a slow store, or computing",
    "tiers": "Time to first token of four documents: computed, and brought from each tier",
    "attention": "Attention over pages in random order, beside torch's over contiguous tensors",
    "head_memory": "Sessions that fit, and payloads: one KV head in eight full, others 256 + 16",
    "copy_rerotate": "Copying and rotating pages on the CPU, beside torch's plain copy",
    "rotate_rows": "Rotating queries and keys on the CPU, beside torch's expression of it",
    "scheduler": "Scheduler: plans of steps, and a replay of Mooncake's conversation on one core",
    "decode_host": "Host time of a decode step beside its model, 1024 tokens a request",
    "engine_load": "An engine under load: random weights, prompts that share nothing",
    "host_load": "An engine under load whose device holds few requests, over the host's memory",
    "host_load_whole": "The same in all layers and with 64 GiB, each contender on a GPU of its own",
    "host_load_at_once": "The same where all requests come at once",
    "host_load_ratio": "The same with 32 GiB of the device and 90 of the host, 2.8 times as much",
    "host_load_arrivals": "Of these 72 at once, going on without pages beside sitting steps out",
    "host_load_copies": "The same 72, waiting for pages: spilled when room is short, or mirrored",
    "ttft_cuda": "Time to first token on a GPU, random weights, bf16, 97 % of the prompt cached",
    "ttft_heads": "Time to first token under a head map, random weights, bf16, 97 % of it cached",
    "ttft_packed": "Time to first token over packed documents and exact ones, random weights",
    "ttft_packed_parts": "Where naive first tokens of these go on a GPU, by class of kernels",
    "heads_quality": "Nearness to full under head maps, 4 segments encoded apart",
    "page_tasks": "Answers of tasks by few pages, asked for behind 256 generated tokens",
    "page_tasks_periods": "The same by how often pages are ranked, and by which score",
    "vllm_ranks": "vLLM 0.26 with the plugin: tensor parallel answers, a small Llama in float32",
    "vllm": "vLLM 0.26 with the plugin and an eighth of global heads, Llama-3.1-8B shape, bf16",
    "vllm_compiled": "The same in vLLM's default mode (torch.compile and graphs)",
    "vllm_load": "The same with many requests at once",
    "vllm_mapped": "vLLM 0.33: requests that fit beside segments and a head map, 8B shape, bf16",
    "vllm_mapped_ranks": "The same over two GPUs",
    "vllm_far": "vLLM 0.33: 16 GiB of KV and pages in the host's memory, 8B shape, bf16",
    "vllm_segments": "vLLM 0.33: first tokens behind documents seen before, 8B shape, bf16",
    "vllm_segments_ranks": "The same over two GPUs",
    "vllm_restart": "vLLM 0.33 started again: first answers about documents on disk, 8B shape",
    "vllm_restart_weighed": "The same in vLLM 0.26 where reading is weighed against computing",
    "vllm_bench": "A load of retrieved documents, vllm bench serve, vLLM 0.33, 8B shape, bf16",
    "vllm_bench_ranks": "The same over two GPUs",
    "vllm_bench_own": "vllm bench: repeated prefixes, and throughput, vLLM 0.33, 8B shape, bf16",
    "vllm_host_step": "Host time of a step of vLLM 0.33, tiny Llama, beside one without the plugin",
    "vllm_host_step_gpu": "The same on a GPU, nine engines at once",
    "vllm_top_k": "vLLM 0.26 with heads that read 64 blocks, ranked at every step, 8B shape, bf16",
    "packed_decode": "Attention of one layer over packed pages, choosing among them, and packing",
    "packed_prefill": "A prompt of 64K tokens packed beside what is computed and behind, 8 of 8B",
    "packed_load": "An engine under load, over packed pages in as much memory as over exact ones",
    "packed_prefill_final": "The same of text that is packed finally, segment by segment, 2 of 8B",
    "packed_copies": "Copies of exact pages on the host, from where text is packed finally",
    "packed_worker": "Decode steps while the host packs a document finally, 8 layers of 8B",
    "packed_worker_final": "The same by strategies and in segments, 4 of 8B",
    "packed_worker_whole": "The same of a document by a strategy, all layers of 8B",
    "packed_capacity": "The longest request and the largest batch one GPU holds, 8B shape",
    "packed_rows": "Rows of a prompt over packed pages as they lie and over a copy, one layer",
    "packed_step": "Whole decode steps over INT4 pages and over exact ones, 8 layers of 8B",
    "packed_kinds": "The same over pages of other kinds, chosen pages and documents, 4 of 8B",
    "replay": "Share of blocks of real prompts that a cache finds with room for a share of them",
    "replay_segments": "The same with documents laid over the prompts: prefixes, and segments too",
    "workflow": "Agents in a ring: whose texts are kept where some of them have room",
    "top_k_step": "Whole decode steps by chosen pages, over the device and over the host, 8B shape",
    "top_k_cadence": "A layer and whole decode steps with a quarter ranked at every step, 8B shape",
    "top_k_step_half": "The same with half as many requests; copies in fp8 and late rankings too",
    "speculation": "Drafts by chosen pages, verified by all: rounds beside dense steps",
    "speculation_text": "The same of a real model over real text: accepted drafts and equal tokens",
    "vllm_soak": "A mixed load on engines of vLLM with segments, exact and packed",
    "vllm_soak_long": "The same for half an hour each: exact segments beside a map, and a server",
    "vllm_own_tests": "vLLM's own tests of what the plugin registers, with it and without",
    "runner_soak": "A mixed load on served runners for an hour: nothing held in quiet, flat memory",
    "zeroing": "Zeroing of what is freed: the same requests with it and without",
    "page_moves": "Chosen pages into slots, and pages between a GPU and pinned memory",
    "block_moves": "Whole blocks between a GPU and pinned memory, beside a decode step",
    "cuda_ops": "Ops on CUDA beside their peers in the same process (above 1 ours is faster)",
    "counters": "Hardware counters (ncu, cold caches) of the kernels that miss a target there",
    "counters_packed": "The same of calls over packed pages",
}
# Rows of a long case that a page has room for.
SHOWN = {"attention": " 4096 ", "packed_decode": " 16 × 32768 "}
HIDDEN = {"elements", "tokens", "text"}
# Columns of a case that has more than a page has room for.
COLUMNS = {
    "ttft_cuda": ("÷ full", "rows", "bound s", "of bound", "peak GiB", "÷ planned", "limit s"),
    "ttft_heads": (
        "÷ full",
        "TFLOPs",
        "full's FLOPs ÷",
        "rows",
        "select ms",
        "working GiB",
        "KV GiB",
        "shared KV GiB",
    ),
    "ttft_packed": ("÷ full", "rows", "select ms", "copy ms", "KV GiB", "shared KV GiB"),
    "page_tasks": ("same token", "score", "more than the whole model's", "n"),
    "page_tasks_periods": ("same token", "score", "more than the whole model's", "n"),
}
VALUE = {
    "replay": "lru",
    "replay_segments": "prefixes alone",
    "runner_soak": "found",
    "vllm_soak": "found",
    "vllm_soak_long": "found",
    "vllm_own_tests": "with the plugin",
    "quality": "KL to full",
    "heads_quality": "KL to full",
    "page_tasks": "KL to all pages",
    "page_tasks_periods": "KL to all pages",
    "head_memory": "with the map",
}
Cell = tuple[str, str | None]
"""A row's name, and the column that is shown; None: the measured value."""


class Choice(NamedTuple):
    """A row of the choice: what it says, and cells of one case, joined by a semicolon.

    `command`: what prints these cells, where it is not all that prints the case.
    """

    what: str
    case: str
    cells: tuple[Cell, ...]
    command: str = ""


REUSED = "TTFT, 32768 tokens, 97 % in documents seen before: segments"
MAPPED = "one head in eight whole"
CHOICE = (
    Choice(
        "time to first token ÷ full, Llama-3.1-8B shape, 97 % of 32K cached: naive; foresight with "
        "10 %; the same with a draft of 8 tokens; sparsex with 10 %; with 1024 rows and ℓ* 12 %",
        "ttft_cuda",
        (
            ("Llama-3.1-8B, 32768 tokens: naive", "÷ full"),
            ("Llama-3.1-8B, 32768 tokens: foresight, 10 %, no draft", "÷ full"),
            ("Llama-3.1-8B, 32768 tokens: foresight, 10 %, draft of 8", "÷ full"),
            ("Llama-3.1-8B, 32768 tokens: sparsex, 10 % by score", "÷ full"),
            ("Llama-3.1-8B, 32768 tokens: sparsex, 1024 by score, ℓ* 12 %", "÷ full"),
        ),
    ),
    Choice(
        "the same at the shape of Qwen3-32B",
        "ttft_cuda",
        (
            ("Qwen3-32B, 32768 tokens: naive", "÷ full"),
            ("Qwen3-32B, 32768 tokens: foresight, 10 %, no draft", "÷ full"),
            ("Qwen3-32B, 32768 tokens: foresight, 10 %, draft of 8", "÷ full"),
            ("Qwen3-32B, 32768 tokens: sparsex, 10 % by score", "÷ full"),
            ("Qwen3-32B, 32768 tokens: sparsex, 1024 by score, ℓ* 12 %", "÷ full"),
        ),
    ),
    *(
        Choice(
            f"{what}, {model}, 32K, 97 % cached, one KV head in eight whole: redknot with a dense "
            "feed-forward in 20 layers; in 3; weave with foresight's rows",
            "ttft_heads",
            tuple(
                (f"{model}, 32768 tokens: {policy}, map, materialise", column)
                for policy in ("redknot, balanced", "redknot, speed", "weave")
            ),
        )
        for model in ("Llama-3.1-8B", "Qwen3-32B")
        for what, column in (
            ("time to first token ÷ full", "÷ full"),
            ("prefill FLOPs, full's ÷ theirs", "full's FLOPs ÷"),
        )
    ),
    Choice(
        "transformers' own forward ÷ our full: Llama-3.1-8B; Qwen3-32B",
        "ttft_cuda",
        (
            ("Llama-3.1-8B, 32768 tokens: transformers", "÷ full"),
            ("Qwen3-32B, 32768 tokens: transformers", "÷ full"),
        ),
    ),
    Choice(
        "paged decode on CUDA, share of the read ceiling: 32 requests of 16K; one of 128K; of 8K",
        "cuda_ops",
        (
            ("decode, B=32, 16K", "of ceiling"),
            ("decode, B=1, 128K", "of ceiling"),
            ("decode, B=1, 8K", "of ceiling"),
        ),
    ),
    Choice(
        "prefill of 5 % single rows of 32K on CUDA, peers' time ÷ ours",
        "cuda_ops",
        (("prefill, 5% of 32K in single rows", "peer ÷ ours"),),
    ),
    Choice(
        "causal prefill of 32K on CUDA, peers' time ÷ ours",
        "cuda_ops",
        (("prefill, all of 32K", "peer ÷ ours"),),
    ),
    Choice(
        "time to first token ÷ full on two CPU cores, 4K tokens: naive; sparsex",
        "ttft",
        (("naive, 4096 tokens", "÷ full"), ("sparsex, 4096 tokens", "÷ full")),
    ),
    Choice(
        "KL to full on held-out text, Bible: naive; epic; cacheblend; sparsex; infoflow; foresight",
        "quality",
        (
            ("lm, kjv, 1024: naive", None),
            ("lm, kjv, 1024: epic(first=32)", None),
            ("lm, kjv, 1024: cacheblend(ratio=0.25)", None),
            ("lm, kjv, 1024: sparsex", None),
            ("lm, kjv, 1024: infoflow", None),
            ("lm, kjv, 1024: foresight", None),
        ),
    ),
    Choice(
        "the same on Python source",
        "quality",
        (
            ("lm, python, 1024: naive", None),
            ("lm, python, 1024: epic(first=32)", None),
            ("lm, python, 1024: cacheblend(ratio=0.25)", None),
            ("lm, python, 1024: sparsex", None),
            ("lm, python, 1024: infoflow", None),
            ("lm, python, 1024: foresight", None),
        ),
    ),
    Choice(
        "vLLM 0.26 with the plugin ÷ stock, Llama-3.1-8B shape, torch.compile: first token of 32K; "
        "decode step of 1, 32 requests of 8K; with one KV head in eight whole: first token of 32K; "
        "decode step of 32 of 8K; of 8 of 120K",
        "vllm_compiled",
        (
            ("TTFT, 32768 tokens, compiled: ours", "÷ stock"),
            ("decode step, B=1, 8192 tokens, compiled: ours", "÷ stock"),
            ("decode step, B=32, 8192 tokens, compiled: ours", "÷ stock"),
            ("TTFT, 32768 tokens, compiled: heads", "÷ stock"),
            ("decode step, B=32, 8192 tokens, compiled: heads", "÷ stock"),
            ("decode step, B=8, 120000 tokens, compiled: heads", "÷ stock"),
        ),
    ),
    Choice(
        "the same under load: throughput of 40 requests; requests of 64K at once with one head in "
        "eight whole",
        "vllm_load",
        (
            ("throughput, 40 requests: ours", "÷ stock"),
            ("requests of 65536 tokens that ran at once: heads", "÷ stock"),
        ),
    ),
    Choice(
        "throughput of 100 requests of 10 to 30K tokens with one head in eight whole ÷ stock",
        "vllm",
        (("throughput, 100 requests: heads", "÷ stock"),),
        f"{VLLM} --jobs throughput",
    ),
    Choice(
        "first token in vLLM 0.33 ÷ stock, 32K of which 97 % are documents seen before: naive; "
        "foresight with 10 %; the same with 4 drafts of 2 tokens; with a draft of 8; sparsex with "
        "ℓ* = 0 and 5 % by score; sparsex as it is",
        "vllm_segments",
        (
            (f"{REUSED}, naive", "÷ stock"),
            (f"{REUSED}, foresight, 10 %, no draft", "÷ stock"),
            (f"{REUSED}, foresight, 10 %, 4 drafts of 2", "÷ stock"),
            (f"{REUSED}, foresight, 10 %, a draft of 8", "÷ stock"),
            (f"{REUSED}, sparsex, ℓ* = 0, 5 % by score", "÷ stock"),
            (f"{REUSED}, sparsex", "÷ stock"),
        ),
    ),
    Choice(
        "the same beside one KV head in eight whole: naive; foresight with 10 %; with 4 drafts of "
        "2 tokens; with a draft of 8",
        "vllm_segments",
        (
            (f"{REUSED}, naive, {MAPPED}", "÷ stock"),
            (f"{REUSED}, foresight, 10 %, no draft, {MAPPED}", "÷ stock"),
            (f"{REUSED}, foresight, 10 %, 4 drafts of 2, {MAPPED}", "÷ stock"),
            (f"{REUSED}, foresight, 10 %, a draft of 8, {MAPPED}", "÷ stock"),
        ),
    ),
    Choice(
        "sessions of 32K tokens in 80 GB, one KV head in eight full, ÷ dense: Qwen3-32B; "
        "Llama-3.3-70B",
        "head_memory",
        (
            ("Qwen3-32B, 32768 tokens, 80 GB", "times"),
            ("Llama-3.3-70B, 32768 tokens, 80 GB", "times"),
        ),
    ),
    Choice(
        "bytes sent from prefill to decode with that map, dense ÷ ours: 8K; 16K",
        "head_memory",
        (
            ("Llama-3.3-70B, payload of 8192 tokens", "bytes ÷"),
            ("Llama-3.3-70B, payload of 16384 tokens", "bytes ÷"),
        ),
    ),
    Choice(
        "block manager: allocate and free a block; look up 128K tokens from Python",
        "block_manager",
        (("allocate_and_free/4096", None), ("look up 128K tokens in Python, xxh3-128", None)),
    ),
    Choice(
        "attention of 10 % single rows on two CPU cores, torch's time ÷ ours",
        "attention",
        (("Llama-8B 4096 float32, 10 % single rows", "torch ÷ ours"),),
    ),
)


def newest(folder: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """The last run of each case, of the files that begin with a date."""
    paths = folder.rglob("[0-9]*.json")  # by date; beside them stand head maps, by model
    runs = [run for path in paths for run in json.loads(path.read_text())]
    runs.sort(key=lambda run: run["time"])
    return {run["case"]: run for run in runs}


def markdown(runs: dict[str, dict[str, Any]]) -> str:
    """One table a case, each under the command that prints it."""
    if not runs:
        return "Nothing was recorded yet: `make bench RECORD=1`.\n"
    return "\n".join(_table(case, runs[case]) for case in TITLES if case in runs)


def choice(runs: dict[str, dict[str, Any]]) -> str:
    """The page's first table; rows whose case was not recorded are left out.

    Raises InvalidArgument for a case whose newest run lacks a row or a column that is shown.
    """
    lines = [markdown_row(["what", "measured", "on", "command"]), "|---|---:|---|---|"]
    for what, case, cells, command in CHOICE:
        if case not in runs:
            continue
        shown = [cell(runs[case], name, column) for name, column in cells]
        machine = runs[case]["machine"]["processor"]
        commands = f"`{command}`" if command else _commands(case)
        lines.append(markdown_row([what, "; ".join(shown), machine, commands]))
    return "\n".join(lines) + "\n"


def _commands(case: str) -> str:
    return "; ".join(f"`{words}`" for words in COMMANDS.get(case, (f"make bench CASE={case}",)))


def _table(case: str, run: dict[str, Any]) -> str:
    # A row without a value is of an op that gave no right answer.
    rows = [r for r in run["rows"] if SHOWN.get(case, "") in r["name"] and "value" in r]
    found = dict.fromkeys(key for row in rows for key in row["of"] if key not in HIDDEN)
    beside = [key for key in found if key in COLUMNS.get(case, found)]
    machine = run["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in machine["packages"].items())
    lines = [
        f"## {TITLES[case]}",
        "",
        f"{_commands(case)}, {run['time'][:10]}: "
        f"{machine['processor']}, {machine['cores']} cores; {versions}.",
        *_ceilings(run),
        "",
    ]
    if case == "heads_quality":
        return "\n".join(lines + budget_tables(rows)) + "\n"
    spread = ["p95"] if any(row["p95"] is not None for row in rows) else []
    heads = ["what", VALUE.get(case, "median"), *spread, *beside]
    lines += [markdown_row(heads), "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        measured = f"{figure(row['value'])} {row['unit']}".rstrip()
        p95 = ["" if row["p95"] is None else figure(row["p95"]) for _ in spread]
        cells = [figure(row["of"][key]) if key in row["of"] else "" for key in beside]
        lines.append(markdown_row([row["name"], measured, *p95, *cells]))
    return "\n".join(lines) + "\n"


def _ceilings(run: dict[str, Any]) -> list[str]:
    """What the device did at its best in the same run, for cases that measure it."""
    found = run.get("ceilings")
    if found is None:
        return []
    parts = found if isinstance(found, list) else [found]

    def span(key: str, scale: float, digits: int) -> str:
        figures = [f"{part[key] * scale:.{digits}f}" for part in parts]
        ends = min(figures, key=float), max(figures, key=float)
        return " to ".join(dict.fromkeys(ends))

    return [
        f"Ceilings in the same {'processes' if len(parts) > 1 else 'run'}: "
        f"copy {span('copy', 1e-12, 2)} TB/s (read and written), "
        f"read {span('read', 1e-12, 2)} TB/s, bf16 matmul {span('matmul', 1e-12, 0)} TFLOP/s, "
        f"empty launch {span('launch_s', 1e6, 1)} µs."
    ]


def filled(text: str, part: str, name: str = "results") -> str:
    """A page with `part` between the two marks of this name."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = text.split(start)
    return before + start + "\n" + part + "\n" + end + rest.split(end)[1]


def of_papers(runs: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """The table of claims of each paper's page.

    Raises InvalidArgument for a figure that was not recorded.
    """
    pages = {PAPERS / f"{name}.md": listed for name, listed in CLAIMS.items()}
    return {page: claims.table(listed, runs, page) for page, listed in pages.items()}


def main() -> int:
    """Fills the pages in; returns the exit status, 1 when a row that is shown was not recorded."""
    runs = newest()
    try:
        chosen, shown, told = choice(runs), headlines.markdown(runs), of_papers(runs)
    except InvalidArgument as error:
        print(error, file=sys.stderr)
        return 1
    parts = [
        (README, shown, "headlines"),
        (RESULTS, chosen, "choice"),
        (RESULTS, markdown(runs), "results"),
        *((page, part, "claims") for page, part in told.items()),
    ]
    if demo_table.CASE in runs:
        parts.append((RESULTS, demo_table.markdown(runs[demo_table.CASE]), "demo"))
    for path, part, name in parts:
        path.write_text(filled(path.read_text(encoding="utf-8"), part, name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
