"""Commands that print the rows of a case, where that is not `make bench`."""

from __future__ import annotations

VLLM = "python -m benchmarks.vllm.serve"
BENCH = "python -m benchmarks.vllm.vllm_bench --jobs rag"
OWN = "python -m benchmarks.vllm.vllm_bench --jobs prefix_repetition throughput"
SEGMENTS = "python -m benchmarks.vllm.segments"
HOST_LOAD = "python -m benchmarks.cases.host_load --json FILE"
HOST_MODEL = '{"layers": 0, "arena_bytes": 68719476736'
HOST_TASK = f'{HOST_MODEL}, "rate": 0.75, "ways": ["Poisson"]'
HOST_RATIO = '{"layers": 0, "rate": 0.65, "host_bytes": 96636764160'
HOST_AT_ONCE = f'{HOST_MODEL}, "ways": ["at once"]'
HOST_ARRIVALS = (
    '{"layers": 0, "arena_bytes": 28454158336, "host_bytes": 96636764160, "requests": 72, '
    '"ways": ["at once"], "whole": false'
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "quality": ("python -m benchmarks.quality.held_out out/quality --device cuda",),
    "heads_quality": ("python -m benchmarks.quality.heads out/heads --map MAP",),
    "page_tasks": ("python -m benchmarks.quality.page_tasks MODEL --device cuda --record",),
    "page_tasks_periods": (
        "python -m benchmarks.quality.page_tasks MODEL --device cuda --pages 16 --every 1 "
        "--every 4 --every 16 --record",
    ),
    "host_load_whole": (
        f"{HOST_LOAD} --task '{HOST_TASK}, \"copies\": []}}'",
        f'{HOST_LOAD} --task \'{HOST_TASK}, "copies": ["cadence"], "whole": false, '
        '"host_bytes": 85899345920}\'',
        f'{HOST_LOAD} --task \'{HOST_TASK}, "copies": ["late"], "whole": false, '
        '"host_bytes": 85899345920, "requests": 150}\'',
        "python -m benchmarks.cases.host_load --join FILE FILE --json FILE",
    ),
    "host_load_at_once": (
        f"{HOST_LOAD} --task '{HOST_AT_ONCE}, \"copies\": []}}'",
        f'{HOST_LOAD} --task \'{HOST_AT_ONCE}, "copies": ["cadence"], "whole": false, '
        '"host_bytes": 85899345920}\'',
        f"{VLLM} --jobs load --engines stock --limit 560 --json FILE --task "
        '\'{"memory": 68719476736, "requests": 200, "answer": [50, 1500], "chunk": 4096, '
        '"ways": ["at once"]}\'',
        "python -m benchmarks.cases.host_load --join FILE FILE FILE --json FILE",
    ),
    "host_load_ratio": (
        f'{HOST_LOAD} --task \'{HOST_RATIO}, "arena_bytes": 34359738368, "copies": []}}\'',
        f'{HOST_LOAD} --task \'{HOST_RATIO}, "arena_bytes": 28454158336, "copies": ["cadence"], '
        '"whole": false}\'',
        f"{VLLM} --jobs load --engines stock --limit 540 --json FILE --task "
        '\'{"memory": 34359738368, "requests": 200, "answer": [50, 1500], "chunk": 4096, '
        '"ways": ["at once"]}\'',
        "python -m benchmarks.cases.host_load --join FILE FILE FILE --case host_load_ratio "
        "--json FILE",
    ),
    "host_load_arrivals": (
        *(
            f'{HOST_LOAD} --task \'{HOST_ARRIVALS}, "copies": ["{way}"]}}\''
            for way in ("late", "sits out")
        ),
        "python -m benchmarks.cases.host_load --join FILE FILE --case host_load_arrivals "
        "--json FILE",
    ),
    "host_load_copies": (
        *(
            f'{HOST_LOAD} --task \'{HOST_ARRIVALS}, "copies": ["{way}"]}}\''
            for way in ("spill", "mirror")
        ),
        "python -m benchmarks.cases.host_load --join FILE FILE --case host_load_copies --json FILE",
    ),
    "replay": ("python -m benchmarks.replay.run FOLDER",),
    "replay_segments": ("python -m benchmarks.replay.segments FOLDER",),
    "runner_soak": ("python -m benchmarks.soak.run --seconds 3600",),
    "vllm_soak": (
        "python -m benchmarks.vllm.soak --seconds 560 --mode int4 half-int4 planes-3 segments",
        "python -m benchmarks.vllm.soak --seconds 480 --mode server",
    ),
    "vllm_soak_long": (
        "python -m benchmarks.vllm.soak --seconds 1860 --quiet-seconds 600 --mode segments",
        "python -m benchmarks.vllm.soak --seconds 1810 --quiet-seconds 300 --mode server",
    ),
    "vllm_own_tests": ("python -m benchmarks.vllm.own_tests --folder FOLDER",),
    "cuda_ops": ("kvweave bench ops",),
    "vllm_bench": (
        f"{BENCH} --engines mapped stock --store-gib 22 --rate 4 --rag '{{\"documents\": 32}}'",
    ),
    "vllm_bench_ranks": (
        f"{BENCH} --ranks 2 --engines mapped stock --requests 64 --store-gib 11 --rate 4 "
        '--rag \'{"documents": 32}\' -- --compilation-config \'{"mode": 0, '
        '"cudagraph_mode": "FULL_DECODE_ONLY", '
        '"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 40, 64]}\'',
    ),
    "vllm_bench_own": (f"{OWN} --engines stock ours heads --rate 4",),
    "vllm_host_step": ("python -m benchmarks.vllm.host_step",),
    "vllm_host_step_gpu": ("python -m benchmarks.vllm.host_step --rounds 8",),
    "vllm_segments": (f"{SEGMENTS} stock segments mapped",),
    "vllm_segments_ranks": (f"{SEGMENTS} mapped stock --ranks 2",),
    "vllm_restart": ("python -m benchmarks.vllm.restart FOLDER",),
    "vllm_restart_weighed": ("python -m benchmarks.vllm.restart FOLDER stock kept",),
    "counters": ("python -m benchmarks.device.counters",),
    "counters_packed": ("python -m benchmarks.device.counters --packed",),
    "vllm": (f"{VLLM} --jobs latency capacity throughput", SEGMENTS),
    "vllm_compiled": (f"{VLLM} --mode compiled --jobs latency decode",),
    "vllm_load": (
        f"{VLLM} --jobs throughput --engines ours stock --task '{{\"requests\": 40}}'",
        f'{VLLM} --jobs capacity --task \'{{"layers": 0, "memory": 27917287424, "chunk": 8192}}\'',
    ),
    "vllm_mapped": (f"{VLLM} --jobs capacity --engines stock mapped",),
    "vllm_mapped_ranks": (f"{VLLM} --jobs capacity --engines mapped stock --ranks 2",),
    "vllm_far": (
        f"{VLLM} --jobs throughput --engines stock far --task "
        '\'{"memory": 17179869184, "requests": 48, "chunk": 8192, "answer": [50, 1500]}\'',
    ),
    "vllm_top_k": (
        f"{VLLM} --jobs decode --engines stock top_k"
        " --task '{\"decodes\": [[40, 10000], [8, 100000]]}'",
    ),
    "vllm_ranks": ("python -m benchmarks.vllm.ranks",),
}
