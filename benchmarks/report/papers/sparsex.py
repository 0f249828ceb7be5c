"""Claims of SparseX: Efficient Segment-Level KV Cache Sharing for Interleaved LLM Serving."""

from benchmarks.report.papers.claims import Claim, recovered, row

SHAPE = "Qwen3-32B, 32768 tokens"
IN_VLLM = "TTFT, 32768 tokens, 97 % in documents seen before: segments"
SCORED = (
    "full",
    "naive",
    "cacheblend(ratio=0.25)",
    "epic(first=32)",
    "sparsex",
    "foresight(share=0.26)",
)

CLAIMS = (
    Claim(
        "Table 1",
        "LOCOMO, Qwen3-32B, first token ÷ full recompute (9.23 s): naive 0.052, EPIC 0.064, "
        "CacheBlend 0.143, SparseX without hybrid layers 0.072 and with them 0.094",
        "the same shape, random weights, 32K tokens of which 97 % are reused, ÷ `full` ({} s): "
        "`naive` {}, `epic` {}, `cacheblend` {}, `sparsex` with 1024 rows by score {}, and with "
        "ℓ\\* at 12 % of the layers {}",
        (
            row("ttft_cuda", f"{SHAPE}: full"),
            row("ttft_cuda", f"{SHAPE}: naive", "÷ full"),
            row("ttft_cuda", f"{SHAPE}: epic", "÷ full"),
            row("ttft_cuda", f"{SHAPE}: cacheblend", "÷ full"),
            row("ttft_cuda", f"{SHAPE}: sparsex, 1024 by score", "÷ full"),
            row("ttft_cuda", f"{SHAPE}: sparsex, 1024 by score, ℓ* 12 %", "÷ full"),
        ),
    ),
    Claim(
        "Table 1",
        "Qwen3-30B-A3B (experts), first token ÷ full recompute with hybrid layers: LOCOMO 0.092 "
        "of 7.32 s, LongMemEval 0.137 of 15.58 s",
        "not measured: no model of experts was timed",
    ),
    Claim(
        "Table 1",
        "LOCOMO scores, Qwen3-32B: full 0.68, naive 0.54, EPIC 0.55, CacheBlend 0.60, SparseX "
        "0.64 without and 0.67 with hybrid layers: 7, 43, 71 and 93 % of the way from naive to "
        "full",
        "LOCOMO was not run. Of the KL between naive and full, on four kinds of questions over "
        "eight documents (Qwen2.5-Coder-0.5B, 4K tokens), are closed by `epic` {}, `cacheblend` "
        "{}, `sparsex` with ℓ\\* at 15 % {} for {} of full's FLOPs; `foresight` of 26 % of the "
        "rows closes {} for {}",
        (
            recovered("epic(first=32)"),
            recovered("cacheblend(ratio=0.25)"),
            recovered("sparsex"),
            recovered("sparsex", "flops_ratio"),
            recovered("foresight(share=0.26)"),
            recovered("foresight(share=0.26)", "flops_ratio"),
        ),
    ),
    Claim(
        "Table 2",
        "RULER's MQ-NIAH, Qwen3-8B, 16K tokens: full 1.00, naive 0.69, CacheBlend 0.81, EPIC "
        "0.84, SparseX 0.90 without and 1.00 with hybrid layers",
        "many needles in eight documents of 4K tokens (Qwen2.5-Coder-0.5B), recall: `full` {}, "
        "`naive` {}, `cacheblend` {}, `epic` {}, `sparsex` {}, `foresight` {}",
        tuple(recovered(policy, "score", "needles") for policy in SCORED),
    ),
    Claim(
        "Table 2",
        "RULER's variable tracking, Qwen3-8B: full 1.00, naive 0.33, CacheBlend 0.65, EPIC 0.49, "
        "SparseX 0.80 without and 0.94 with hybrid layers",
        "chains of assignments, as above: `full` {}, `naive` {}, `cacheblend` {}, `epic` {}, "
        "`sparsex` {}, `foresight` {}",
        tuple(recovered(policy, "score", "chain") for policy in SCORED),
    ),
    Claim(
        "Table 2",
        "mean of four RULER tasks, SparseX with hybrid layers and full: Qwen3-8B 0.94 and 0.96, "
        "Qwen3-32B 0.98 and 0.97",
        "not measured: RULER itself was not run, nor any model of that size",
    ),
    Claim(
        "Table 3",
        "agents (AutoGen and debate), scores mostly within a few points of a full prefill: "
        "Qwen2.5-72B, AutoGen, MATH 82.00 and 79.20, GPQA 43.08 and 42.86",
        "not measured: prompts of these two kinds are tasks of `kvweave eval`, and no run of them "
        "is on record",
    ),
    Claim(
        "§5",
        "the times of Table 1 are those of a changed vLLM 0.11",
        "vLLM 0.26 with the plugin ÷ stock, Llama-3.1-8B shape, 32K tokens of which 97 % were "
        "seen before: `naive` {}, `sparsex` with ℓ\\* = 0 and 5 % by score {}, as it is {}; "
        "`foresight` with 10 % {}, and with a draft of 8 tokens {}",
        (
            row("vllm", f"{IN_VLLM}, naive", "÷ stock"),
            row("vllm", f"{IN_VLLM}, sparsex, ℓ* = 0, 5 % by score", "÷ stock"),
            row("vllm", f"{IN_VLLM}, sparsex", "÷ stock"),
            row("vllm", f"{IN_VLLM}, foresight, 10 %, no draft", "÷ stock"),
            row("vllm", f"{IN_VLLM}, foresight, 10 %, a draft of 8", "÷ stock"),
        ),
    ),
    Claim(
        "§3.1",
        "a segment is moved by one kernel, which touches each key and value once",
        "`copy_rerotate`, 2 GiB of Llama-3.1-8B's keys and values: {} of the memory's copy rate",
        (row("cuda_ops", "copy_rerotate, Llama-8B bfloat16, 2048 MiB", "of ceiling"),),
    ),
)
