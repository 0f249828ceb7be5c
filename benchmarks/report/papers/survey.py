"""What a survey of KV caches says of the usual techniques."""

from benchmarks.report.papers.claims import Claim, row

CHATS = "Mooncake, conversation, 10 %: 18279 blocks"
LOAD = "Llama-3.1-8B, 100 of 10000 to 30000, 500 out, at once"
RING = "SmolLM2-135M, 10 agents of 1024 tokens, room for"
ALL_STEPS = "LRU ÷ this, all steps"
TIER = "Llama-3.1-8B, 32768 tokens"
OWN = "what he has cached himself"

CLAIMS = (
    Claim(
        "§3, PagedAttention",
        "pages on demand use more than 90 % of the memory, where reservations waste 60 to 80 %; 4 "
        "to 6 times the throughput of plain transformers",
        "an arena of 80 GB filled with sessions of 32K tokens, of the Qwen3-32B shape: {} of it "
        "used (one KV head in eight whole)",
        (row("head_memory", "Qwen3-32B, 32768 tokens, 80 GB", "filled"),),
    ),
    Claim(
        "§4, prefix caching",
        "shared prefixes are computed once: 2 to 3 times the throughput",
        "looking up a prefix of 128K tokens from Python takes {} ms, allocating and freeing a "
        "block {} ns",
        (
            row("block_manager", "look up 128K tokens in Python, xxh3-128"),
            row("block_manager", "allocate_and_free/4096"),
        ),
    ),
    Claim(
        "§5, RadixAttention",
        "a tree with the granularity of a token: first tokens 2.9 to 4 times as early",
        "not measured beside SGLang; prefixes end at any token here too",
    ),
    Claim(
        "§6, KVFlow",
        "eviction by what agents need next: 1.83 times SGLang's speed for one workflow, 2.19 for "
        "many",
        "no comparison with SGLang. A ring of 10 agents of 1024 tokens on two CPU cores "
        "(SmolLM2-135M): told by a workflow {} and {} times the speed of the least recently used "
        "order over all steps, with room for 5 and for 8 of them",
        (
            row("workflow", f"{RING} 5: told by a workflow", ALL_STEPS),
            row("workflow", f"{RING} 8: told by a workflow", ALL_STEPS),
        ),
    ),
    Claim(
        "§7, Mooncake",
        "GPU, host and disk as tiers, behind less than 1, 5 to 10, and 50 to 100 ms",
        "documents of 32K tokens, Llama-3.1-8B shape, first token in s: from the device {}, the "
        "host {}, that machine's disk {}, computed {}",
        (
            row("tiers", f"{TIER}, device"),
            row("tiers", f"{TIER}, host"),
            row("tiers", f"{TIER}, disk"),
            row("tiers", f"{TIER}, computed"),
        ),
    ),
    Claim(
        "§7, eviction",
        "least recent and least frequent use decide what goes",
        "an hour of chats of Mooncake's trace, room for a tenth of its blocks: of all blocks the "
        "least recently used order finds {}, the least frequently used {}, cost-aware eviction {}, "
        "and told of sessions {}; who knows the future {}",
        (
            row("replay", CHATS),
            row("replay", CHATS, "lfu"),
            row("replay", CHATS, "cost-aware"),
            row("replay", CHATS, "told of sessions"),
            row("replay", CHATS, "Belady"),
        ),
    ),
    Claim(
        "§8, LMCache",
        "8 to 15 times faster by caches beyond one engine",
        "not measured beside LMCache; hosts share documents by a remote store (docs/tiers.md)",
    ),
    Claim(
        "§9, continuous batching",
        "requests join and leave between two steps",
        "100 requests of 10 to 30K tokens at once, Llama-3.1-8B shape: {} tokens a second, vLLM "
        "0.26 {}",
        (
            row("engine_load", f"{LOAD}: tokens in and out"),
            row("engine_load", f"{LOAD}: tokens in and out: vLLM 0.26"),
        ),
    ),
    Claim(
        "§10, timing",
        "a faster answer tells one user what another has asked",
        "vLLM 0.26 with the plugin: a classifier of first tokens' times tells {} of what another "
        "tenant has cached of prompts and {} of documents, where guessing tells half; of what is "
        "one's own {} and {}. Through vLLM 0.33's server it tells {} and {}, and of one's own {} "
        "and {}; on a CPU, of what lies in its offloading, {} in the host's memory and {} on the "
        "disk. A runner, on a CPU: of another's {} on the device, {} in the host's memory, {} on "
        "the disk and {} in a remote store; of one's own {}, {}, {} and {}, and {} where first "
        "tokens are held back",
        (
            *(
                row("vllm_isolation", f"vLLM, {kind}: {whose}")
                for whose in ("what another has cached", OWN)
                for kind in ("prompts", "documents")
            ),
            *(
                row("vllm_isolation_server", f"vLLM's server, {kind}: {whose}")
                for whose in ("what another has cached", OWN)
                for kind in ("prompts", "documents")
            ),
            *(
                row(
                    "vllm_isolation_server_tiers",
                    f"vLLM's server, {kind}: what another has cached",
                )
                for kind in ("host", "disk")
            ),
            *(
                row("isolation", f"{tier}: {whose}")
                for whose in ("what another has cached", OWN)
                for tier in ("device", "host", "disk", "remote")
            ),
            row("isolation", f"device: {OWN}, held back to multiples of 50 ms"),
        ),
    ),
)
