"""Claims of RedKnot: Head-Aware KV Reuse and SegPagedAttention."""

from benchmarks.report.papers.claims import (
    Claim,
    Figure,
    beside,
    inverse,
    mapped,
    milliseconds,
    row,
)

POLICIES = ("redknot, balanced", "redknot, speed", "weave")
TEXT = "smollm2, lm, kjv, 4096, window 256"
AT_ONCE = "requests of 65536 tokens that ran at once"
LAYERS = "64 layers, 4 of 8 KV heads full, decode, B=1"
LAYER = "1 layer, 4 of 8 KV heads full, prefill, all of"
RAGGED = "ragged decode, 4 of 8 KV heads full, B=1"


def _faster(model: str, tokens: int) -> tuple[Figure, ...]:
    names = [f"{model}, {tokens} tokens: {policy}, map, materialise" for policy in POLICIES]
    return tuple(row("ttft_heads", name, "÷ full", inverse) for name in names)


def _cheaper(model: str, tokens: int) -> tuple[Figure, ...]:
    whole = f"{model}, {tokens} tokens: full"
    names = [f"{model}, {tokens} tokens: {policy}, map, materialise" for policy in POLICIES]
    figures = [row("ttft_heads", whole, "TFLOPs")]
    for name in names:
        figures += [row("ttft_heads", name, "TFLOPs"), row("ttft_heads", name, "full's FLOPs ÷")]
    return tuple(figures)


SAID_FLOPS = (
    "`full` {} TFLOP; `redknot` with a dense feed-forward in 20 layers {} (÷ {}), in 3 layers {} "
    "(÷ {}); `weave` {} (÷ {})"
)

CLAIMS = (
    Claim(
        "Figure 3",
        "KV heads that need the whole context: Mistral-7B 15.6 %, Qwen3-32B 15.0 %, Llama-3.3-70B "
        "12.5 %",
        "kept whole, and KL to the whole model then, at 4096 tokens, on text and on hidden "
        "numbers: SmolLM2-135M {} of 90, {} and {}; Qwen2.5-Coder-0.5B {} of 48, {} and {}",
        (
            mapped("smollm2", "global_heads"),
            mapped("smollm2", "held_out_kl", "text"),
            mapped("smollm2", "held_out_kl", "answers"),
            mapped("qwen-coder", "global_heads"),
            mapped("qwen-coder", "held_out_kl", "text"),
            mapped("qwen-coder", "held_out_kl", "answers"),
        ),
    ),
    Claim(
        "Figure 7 (a), abstract",
        "first token 1.6 to 3.5 times as early as by dense prefill, on three models, 8K to 64K "
        "tokens, one to eight GPUs",
        "random weights, one KV head in eight whole, 32K tokens, times as early as `full`: "
        "Llama-3.1-8B shape `redknot` with a dense feed-forward in 20 layers {}, in 3 layers {}, "
        "`weave` {}; Qwen3-32B shape {}, {}, {}",
        (*_faster("Llama-3.1-8B", 32768), *_faster("Qwen3-32B", 32768)),
    ),
    Claim(
        "Figure 7 (b) to (d)",
        "answers nearer to dense than those of CacheBlend and ProphetKV; HotpotQA, Llama-3.3-70B: "
        "exact match from 0.60 by dense prefill to 0.80",
        "HotpotQA was not run. KL on text, SmolLM2-135M, 4096 tokens: `full` with an eighth of "
        "the heads whole {}, `redknot` under the same map {}, with a dense feed-forward {}; "
        "without a map `cacheblend` {}, `naive` {}",
        (
            row("heads_quality", f"{TEXT}: full @ 12.5 %"),
            row("heads_quality", f"{TEXT}: redknot @ 12.5 %"),
            row("heads_quality", f"{TEXT}: redknot, dense feed-forward @ 12.5 %"),
            row("heads_quality", f"{TEXT}: cacheblend"),
            row("heads_quality", f"{TEXT}: naive"),
        ),
    ),
    Claim(
        "Figure 8",
        "FLOPs of a prefill, Qwen3-32B, 16K tokens: 1.36 P dense, 0.44 P by RedKnot (÷ 3.1)",
        f"the same shape and length: {SAID_FLOPS}",
        _cheaper("Qwen3-32B", 16384),
    ),
    Claim(
        "Figure 8",
        "Mistral-7B, 16K tokens: 0.39 P dense, 0.10 P by RedKnot (÷ 3.9)",
        f"Llama-3.1-8B, whose layers are of the same shape: {SAID_FLOPS}",
        _cheaper("Llama-3.1-8B", 16384),
    ),
    Claim(
        "Figure 8",
        "Llama-3.3-70B: 7.92 P dense and 1.22 P at 32K, 21.4 P and 2.64 P (÷ 8.1) at 64K",
        "not measured: that model's shape was not prefilled",
    ),
    Claim(
        "Figure 9",
        "decode with a mask instead of none, one Qwen3-32B layer: 4.9, 6.8 and 7.6 times as long "
        "at 8K, 32K and 128K",
        "half of the heads full, one request: SDPA of torch 2.11 with a mask takes {} and {} "
        "times as long as our ragged kernel at 32K and 128K, {} and {} where heads are rows of "
        "the batch",
        (
            beside("cuda_ops", f"{RAGGED}, 32K", "SDPA + mask"),
            beside("cuda_ops", f"{RAGGED}, 128K", "SDPA + mask"),
            beside("cuda_ops", f"{RAGGED}, 32K", "SDPA + mask, heads as rows"),
            beside("cuda_ops", f"{RAGGED}, 128K", "SDPA + mask, heads as rows"),
        ),
    ),
    Claim(
        "Figures 9 and 10, §5.4",
        "decode of 64 such layers, half of the heads full: 12.6, 12.4 and 24.1 ms at 8K, 32K and "
        "128K; 2.5, 9.8 and 21.0 times as fast as dense with a mask",
        "the same: {}, {} and {} ms; FlashAttention 3 with heads as rows of the batch takes {}, "
        "{} and {} times as long",
        (
            row("cuda_ops", f"{LAYERS}, 8K", None, milliseconds),
            row("cuda_ops", f"{LAYERS}, 32K", None, milliseconds),
            row("cuda_ops", f"{LAYERS}, 128K", None, milliseconds),
            beside("cuda_ops", f"{LAYERS}, 8K", "FA3 head-as-batch"),
            beside("cuda_ops", f"{LAYERS}, 32K", "FA3 head-as-batch"),
            beside("cuda_ops", f"{LAYERS}, 128K", "FA3 head-as-batch"),
        ),
    ),
    Claim(
        "Figure 11",
        "prefill of 64 such layers: 0.055, 0.12 and 0.23 s at 8K, 32K and 128K, of rows that it "
        "does not count; 6.3, 11.3 and 23.3 times as fast as dense with a mask",
        "all rows of one layer: {}, {} and {} ms",
        (
            row("cuda_ops", f"{LAYER} 8K", None, milliseconds),
            row("cuda_ops", f"{LAYER} 32K", None, milliseconds),
            row("cuda_ops", f"{LAYER} 128K", None, milliseconds),
        ),
    ),
    Claim(
        "Figure 13 (a)",
        "bytes from prefill to decode: Llama-3.3-70B 4.3 and 5.7 times fewer at 8K and 16K, "
        "Qwen3-32B 5.6 to 6.3 times; time of the transfer up to 4.1 times less",
        "counted for one KV head in eight whole, the others 16 + 256 tokens: Llama-3.3-70B {} and "
        "{} times fewer, Qwen3-32B {} and {}; no transfer between hosts was timed",
        (
            row("head_memory", "Llama-3.3-70B, payload of 8192 tokens", "bytes ÷"),
            row("head_memory", "Llama-3.3-70B, payload of 16384 tokens", "bytes ÷"),
            row("head_memory", "Qwen3-32B, payload of 8192 tokens", "bytes ÷"),
            row("head_memory", "Qwen3-32B, payload of 16384 tokens", "bytes ÷"),
        ),
    ),
    Claim(
        "Figure 13 (b)",
        "bursts of requests, still over dense tensors with a mask: 15 to 43 % more requests a "
        "second",
        "vLLM 0.26 with the plugin, Llama-3.1-8B shape, 100 requests of 10 to 30K tokens at once: "
        "{} times stock's tokens a second",
        (row("vllm", "throughput, 100 requests: heads", "÷ stock"),),
    ),
    Claim(
        "Figure 13 (c)",
        "sessions in a GPU's memory: 31 instead of 4 at 32K tokens, 14 instead of about 3 at 64K, "
        "as counted from the layout",
        "run in vLLM, 64K tokens, Llama-3.1-8B shape, 26 GiB of KV: {} at once where stock runs "
        "{}; filled in an allocator's 80 GB, Qwen3-32B, 32K: {} where dense ones are {}",
        (
            row("vllm_load", f"{AT_ONCE}: heads"),
            row("vllm_load", f"{AT_ONCE}: stock"),
            row("head_memory", "Qwen3-32B, 32768 tokens, 80 GB"),
            row("head_memory", "Qwen3-32B, 32768 tokens, 80 GB", "dense"),
        ),
    ),
)
