"""Claims of FlexiCache: Leveraging Temporal Stability of Attention Heads."""

from benchmarks.report.papers.claims import (
    Claim,
    chosen,
    missing,
    row,
    shared_by_tasks,
    stable,
)

LOAD = "Llama-3.1-8B, 200 of 10000 to 30000, 50 to 1500 out, at once: over the host"
WHOLE = (
    "Llama-3.1-8B, 200 of 10000 to 30000, 50 to 1500 out, Poisson at 0.75/s: over the host, cadence"
)
AT_ONCE = f"{LOAD}, cadence"
BEYOND = "KV held beyond 20000"
LAYER = "40 × 10240 tokens, 64 pages"
STEP = "40 × 10240, 32 layers"
CADENCE = "a layer of 40 × 10240 tokens, 64 pages, at the paper's cadence"

CLAIMS = (
    Claim(
        "Table 1, Tables 4 to 6, Figure 1",
        "the unstable quarter of the heads is a model's own: Llama-3.1-8B, two of eight tasks "
        "share 0.83 of it on average; Mistral-7B 0.83, Mistral-Small-24B 0.76, Qwen2.5-32B 0.81 "
        "(A.1)",
        "two of six tasks on average: SmolLM2-135M {} of it, Qwen2.5-Coder-0.5B {}, where {} is "
        "chance",
        (
            shared_by_tasks("smollm2"),
            shared_by_tasks("qwen-coder"),
            stable("shared_by_chance"),
        ),
    ),
    Claim(
        "Table 2",
        "LongBench, 1024 tokens read, share of dense scores: Llama-3.1-8B 1.00, Mistral-7B 0.99",
        "not measured: LongBench was not run",
    ),
    Claim(
        "Table 3",
        "L-Eval, Llama-3.1-8B, share of dense scores: 1024 tokens 0.99, 2048 tokens 0.99; all "
        "heads ranked seldom 0.96, never 0.89",
        "L-Eval was not run. KL to the whole model, SmolLM2-135M, 1024 tokens of context, 256 "
        "decode steps a prompt, 256 and 512 tokens read: {} and {} where the unstable quarter "
        "reads all, {} and {} where it is ranked at every step (the paper's setting), {} and {} "
        "where it is ranked as seldom as the others",
        (
            chosen(16, "full"),
            chosen(32, "full"),
            chosen(16, "ranked"),
            chosen(32, "ranked"),
            chosen(16, "as stable"),
            chosen(32, "as stable"),
        ),
    ),
    Claim(
        "Figure 5",
        "500 requests of 10 to 30K tokens, 50 to 1500 out: 1.38 to 1.55 times vLLM's tokens a "
        "second (Llama-3.1-8B), 1.44 to 1.46 times (Mistral-7B)",
        "200 requests of that kind at once, 4 layers of the Llama-3.1-8B shape and 2 GiB of the "
        "device for KV: {} times our own dense engine, {} times vLLM 0.26 with as much memory; "
        "all layers and 64 GiB, where prefills take half of the time: {} times our own, {} times "
        "vLLM 0.33; 32 GiB and 90 of the host, the paper's ratio: {} and {} times",
        (
            row("host_load", f"{LOAD}: tokens in and out", "× all"),
            row("host_load", f"{LOAD}: tokens in and out", "× vLLM"),
            row("host_load_at_once", f"{AT_ONCE}: tokens in and out", "× all"),
            row("host_load_at_once", f"{AT_ONCE}: tokens in and out", "× vLLM"),
            row("host_load_ratio", f"{AT_ONCE}: tokens in and out", "× all"),
            row("host_load_ratio", f"{AT_ONCE}: tokens in and out", "× vLLM"),
        ),
    ),
    Claim(
        "Figure 6",
        "Poisson arrivals at 0.4 a second: time per output token 2.1 times less than vLLM's with "
        "1024 tokens read (34.6, 71.5), 1.6 times less with 2048",
        "200 requests of that kind, three in four seconds, all layers, 64 GiB of the device for "
        "KV, the paper's cadence and 1024 tokens read: the median time between two tokens {} ms, "
        "{} times less than our dense engine's, which this rate saturates; a request's time a "
        "token, prefills of others among it, {} times less on average; first tokens come {} times "
        "as early. Beside vLLM 0.33 these are {}, {} and {} times",
        (
            row("host_load_whole", f"{WHOLE}: between tokens"),
            row("host_load_whole", f"{WHOLE}: between tokens", "× all"),
            row("host_load_whole", f"{WHOLE}: between tokens", "× all, a token"),
            row("host_load_whole", f"{WHOLE}: first token", "× all"),
            row("host_load_whole", f"{WHOLE}: between tokens", "× vLLM"),
            row("host_load_whole", f"{WHOLE}: between tokens", "× vLLM, a token"),
            row("host_load_whole", f"{WHOLE}: first token", "× vLLM"),
        ),
    ),
    Claim(
        "Figure 7",
        "decode of a layer, 40 requests of 10K tokens, 1024 tokens read: up to 4 times as fast as "
        "dense, choosing included",
        "a layer that chooses anew {} times, with an earlier choice {} times, at the paper's "
        "cadence {} times; a whole step of 32 layers at that cadence {} times; in vLLM, where each "
        "step chooses anew, {} of stock's time for 40 × 10 000",
        (
            row("page_choice", f"{LAYER}: score, select, gather, attend", "all ÷ this"),
            row("page_choice", f"{LAYER}: attend to what was chosen", "all ÷ this"),
            row("top_k_cadence", CADENCE, "all ÷ this"),
            row("top_k_cadence", f"{STEP}: 64 pages, a quarter at every step", "all ÷ this"),
            row("vllm_top_k", "decode step, B=40, 10000 tokens: top_k", "÷ stock"),
        ),
    ),
    Claim(
        "Figure 8",
        "ranking the unstable quarter at every step and the others every 16: 2.44 times as fast "
        "as ranking all, 40 requests of 10K tokens",
        "the same cadence and load: a layer {} µs on average, {} where all are ranked; a whole "
        "step {} ms on average, {} in the step that ranks all",
        (
            row("top_k_cadence", CADENCE),
            row("top_k_cadence", CADENCE, "everybody ranked µs"),
            row("top_k_cadence", f"{STEP}: 64 pages, a quarter at every step"),
            row("top_k_cadence", f"{STEP}: 64 pages, a quarter at every step", "all ranked ms"),
        ),
    ),
    Claim(
        "Figure 9",
        "device memory of a request: 70 % less from 20K tokens on",
        "by the allocator, under the load of Figure 5's row: {} less in 4 layers, {} in all, where "
        "host memory is short, {} at the paper's ratio, {} of requests beyond 20 000 tokens then; "
        "under that of Figure 6's {}; one request of 128K tokens "
        "whose heads are all stable has {} GB of its {} GB on the device",
        (
            row("host_load", f"{LOAD}: tokens in and out", "KV held", missing),
            row("host_load_at_once", f"{AT_ONCE}: tokens in and out", "KV held", missing),
            row("host_load_ratio", f"{AT_ONCE}: tokens in and out", "KV held", missing),
            row("host_load_ratio", f"{AT_ONCE}: tokens in and out", BEYOND, missing),
            row("host_load_whole", f"{WHOLE}: tokens in and out", "KV held", missing),
            row("top_k_step", "1 × 131072, 32 layers: 64 pages, over the host", "KV GB"),
            row("top_k_step", "1 × 131072, 32 layers: 64 pages", "KV GB"),
        ),
    ),
    Claim(
        "Table 7",
        "a ranking brings 23 to 35 % of what is chosen (2048 tokens) from the host",
        "not measured on real keys of such lengths: with random ones nearly all is brought anew, "
        "which the steps over the host above contain",
    ),
)
