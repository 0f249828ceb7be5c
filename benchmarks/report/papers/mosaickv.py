"""Claims of MosaicKV: Dynamic Two-D KV Cache Compression."""

from benchmarks.report.papers.claims import Claim, packed, row, written

PAGE = "docs/packed-kv.md"
STEP = "Llama-3.1-8B, 8 layers"
PROMPT = f"{STEP}, a prompt of 65536"
LAYER = "Llama-3.1-8B, one layer, 16 × 131072 tokens"

CLAIMS = (
    Claim(
        "Table 1",
        "25 % of the channels and 10 % of the tokens kept: RULER at 64K, Llama-3.1-8B 89.85 (full "
        "91.56), Qwen3-4B 90.47 (92.95); LongBench 32.84 (33.51) and 22.17 (22.61)",
        "not measured: neither benchmark was run, nor a model of that size",
    ),
    Claim(
        "Figure 9",
        "LongBench ÷ full, Llama-3.1-8B: rotation adds 20.8 %, choosing in each vector 64.5 %, "
        "strategies by segment bring it to 98 %",
        "another measure: KL to exact pages, SmolLM2-135M, a quarter of the blocks read: the same "
        "quarter of the channels of all vectors in bf16 {}; in the text's own basis {}; chosen in "
        "each vector {}; strategies by loss, in more bytes, {}; INT4 pages {}; half of "
        "each vector in four bits, one basis for the model {}",
        tuple(
            packed(f"{way}, a quarter of blocks")
            for way in (
                "25 % bf16, the same channels of all vectors",
                "25 % bf16, the same channels of all vectors, own basis",
                "25 % bf16, own basis, not centred (MosaicKV)",
                "strategies that lose 0.03 at most (MosaicKV)",
                "INT4",
                "50 % int4, calibrated basis",
            )
        ),
    ),
    Claim(
        "Figure 10 (a)",
        "KV of Llama-3.1-8B: 3 times fewer bytes than full, 3.18 times fewer than Quest",
        "bytes of a page at the same head dim, of bf16's: the paper's quarter in bf16 1 / {}, "
        "half in four bits 1 / {}, INT4 1 / {}",
        (
            written(PAGE, "| `quarter-bf16`", "3.20", "by formula and test"),
            written(PAGE, "| `half-int4`", "5.12", "by formula and test"),
            written(PAGE, "| `int4`", "3.66", "by formula and test"),
        ),
    ),
    Claim(
        "Figure 8",
        "attention of a decode step up to 16 times as fast as full and 2.4 times as fast as "
        "Quest, 6.25 or 12.5 % of the tokens chosen",
        "a layer of the Llama-3.1-8B shape, 16 requests of 128K tokens, 10 % of the blocks chosen "
        "in the step, times as fast as bf16 pages that are all read: the paper's quarter in bf16 "
        "{}, half in four bits {}, three bits of a basis {}, INT4 {}; chosen in an earlier step "
        "{}, {}, {} and {}. Exact pages on another card, 2048 tokens of 128K, 8 requests: {} times "
        "with the choice made anew, {} with an earlier one",
        (
            *(
                row("packed_decode", f"{LAYER}: {name}, 10 % of the blocks{when}", "bf16 ÷ this")
                for when in ("", " of an earlier choice")
                for name in ("quarter-bf16", "half-int4", "planes-3", "int4")
            ),
            row(
                "page_choice",
                "8 × 131072 tokens, 128 pages: score, select, gather, attend",
                "all ÷ this",
            ),
            row(
                "page_choice",
                "8 × 131072 tokens, 128 pages: attend to what was chosen",
                "all ÷ this",
            ),
        ),
    ),
    Claim(
        "Figure 10 (b)",
        "a decode step of 4 requests of 1M tokens 4.8 times as fast as vLLM's, 3.8 times on "
        "average over lengths; extrapolated from some of the layers where memory does not suffice",
        "INT4 pages, all tokens, whole steps of 8 layers: {} times as fast as exact pages for 16 "
        "× 32K, {} for 40 × 10K, {} for 1 × 128K",
        (
            row("packed_step", f"{STEP}, 16 × 32768: int4", "exact ÷ this"),
            row("packed_step", f"{STEP}, 40 × 10240: int4", "exact ÷ this"),
            row("packed_step", f"{STEP}, 1 × 131072: int4", "exact ÷ this"),
        ),
    ),
    Claim(
        "Figure 10 (c)",
        "throughput of decoding 7.3 times vLLM's at 1M tokens, 5.5 times on average",
        "not measured: no load was run over packed pages",
    ),
    Claim(
        "Table 2",
        "packing adds 7.6 % to a prefill of 64K tokens, 0.4 % to one of 1M; a full buffer of 32 "
        "tokens takes 40.6 µs",
        "a prefill of 64K tokens takes {} times as long in INT4 and {} times in half-int4, reading "
        "what is packed of it included; 64 tokens in all layers take {} µs in INT4",
        (
            row("packed_step", f"{PROMPT}: int4", "÷ exact"),
            row("packed_step", f"{PROMPT}: half-int4", "÷ exact"),
            row("packed_decode", "a full buffer of 1: pack int4"),
        ),
    ),
    Claim(
        "§6.4",
        "1.44M tokens of one request in 80 GB, where vLLM has no room for 512K",
        "an H200 of 141 GB, all layers, random keys and values that no prompt was computed for: "
        "one request of {} tokens in exact pages, {} in INT4, {} in half-int4 and {} in three bits "
        "of a basis, each of which decodes; requests of 32K tokens {}, {}, {} and {}",
        tuple(
            row("packed_capacity", f"Llama-3.1-8B, {what}: {name}")
            for what in ("one request", "requests of 32768")
            for name in ("exact", "int4", "half-int4", "planes-3")
        ),
    ),
)
