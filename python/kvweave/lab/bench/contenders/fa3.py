"""FlashAttention-3 for Hopper, as vLLM builds and calls it.

Its library needs no vLLM around it: only the package's folder must be found. What an engine
computes once a step (the schedule of a batch) is prepared, not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvweave.lab.bench.contenders.contender import Contender
from kvweave.lab.bench.device_timing import Call
from kvweave.lab.bench.pages import PAGE
from kvweave.lab.bench.problems import Attention, Layers, Problem
from kvweave.lab.bench.shapes import WINDOW, Decode, Prefill

LIBRARY = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
# What an argument is where nothing else is said; every other optional one is None.
DEFAULTS: dict[str, Any] = {
    "is_causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "has_softcap": False,
    "is_rotary_interleaved": True,
    "max_seqlen_k_new": 0,
    "num_splits": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


def missing(device: torch.device) -> str:
    """Loads the library."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "it needs a Hopper GPU"
    package = find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return "vllm, which has its library, is not installed"
    library = Path(package.submodule_search_locations[0]) / LIBRARY
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"its library does not load: {error}"
    return ""


def contenders(problem: Problem) -> Iterator[Contender]:
    """Decode in our pages and in its customary layout; ragged heads as a batch; prefill."""
    if isinstance(problem, Layers):
        yield Contender("FA3 head-as-batch", lambda: _layers(problem))
        yield Contender("FA3, all heads full", lambda: _full_layers(problem), same=False)
    if not isinstance(problem, Attention):
        return
    work = problem.work
    if isinstance(work, Decode) and not work.dense:
        yield Contender("FA3 head-as-batch", lambda: _head_as_batch(problem))
    elif isinstance(work, Decode):
        yield Contender("FA3", lambda: _decode(problem, *_in_place(problem)))
        yield Contender("FA3 NHD", lambda: _decode(problem, *_token_major(problem)))
    elif work.dense:
        yield Contender("FA3", lambda: _dense_prefill(problem))
        yield Contender("FA3 paged", lambda: _sequences(problem, [work.tokens]))
    elif work.local:
        yield Contender("FA3, full and window apart, no sink", lambda: _split(problem), same=False)
        yield Contender("FA3, all heads full", lambda: _dense_prefill(problem), same=False)
    else:
        lengths = [work.run] * (len(problem.positions) // work.run)
        yield Contender("FA3, a sequence a run", lambda: _sequences(problem, lengths))


def _in_place(problem: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """K, V [blocks, P, G, D], views of our own pages."""
    k, v = problem.pool.blocks_view()
    return k.transpose(1, 2), v.transpose(1, 2)


def _token_major(problem: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = _in_place(problem)
    return k.contiguous(), v.contiguous()


def _decode(problem: Attention, k: torch.Tensor, v: torch.Tensor) -> Call:
    pool = problem.pool
    lengths = pool.put(problem.positions + 1)
    arguments = _one_row_each(pool.put(pool.block_table()), lengths, pool.tokens)
    return _scheduled(problem.q, k, v, arguments)


def _head_as_batch(problem: Attention) -> Call:
    """Each KV head of each request is a sequence of its own in a cache with one head."""
    pool = problem.pool
    k, v = (pages.transpose(1, 2) for pages in pool.heads_view())
    q = problem.q.view(pool.batch * pool.shape.kv_heads, -1, pool.shape.head_dim)
    lengths = pool.put(pool.lengths()).repeat(pool.batch)
    table = pool.put(pool.page_table()).flatten(0, 1)
    call = _scheduled(q, k, v, _one_row_each(table, lengths, pool.tokens))
    return lambda: call().view(problem.q.shape)


def _layers(problem: Layers) -> Call:
    calls = [_head_as_batch(layer) for layer in problem.each]
    return lambda: [call() for call in calls]


def _full_layers(problem: Layers) -> Call:
    """What heads that all read everything cost: K, V of each layer [blocks, P, G, D], in order."""
    first = problem.each[0]
    s, blocks = first.pool.shape, first.pool.tokens // PAGE
    size = (s.layers, 2, blocks, PAGE, s.kv_heads, s.head_dim)
    both = torch.empty(size, dtype=first.q.dtype, device=first.pool.device).normal_()
    table = torch.arange(blocks, dtype=torch.int32, device=both.device)[None]
    lengths = first.pool.put(first.positions + 1)
    arguments = _one_row_each(table, lengths, first.pool.tokens)
    calls = [
        _scheduled(layer.q, k, v, arguments)
        for layer, (k, v) in zip(problem.each, both, strict=True)
    ]
    return lambda: [call() for call in calls]


def _split(problem: Attention) -> Call:
    """Heads that see everything in one call, the others in another that knows windows only."""
    pool, work = problem.pool, problem.work
    assert isinstance(work, Prefill)
    k, v, _ = pool.dense()
    k, v = (x[0].transpose(0, 1) for x in (k, v))
    cut, rows = work.full_heads, problem.q.shape[1] // pool.shape.kv_heads * work.full_heads
    full = _causal(problem.q[:, :rows], k[:, :cut], v[:, :cut])
    near = _causal(problem.q[:, rows:], k[:, cut:], v[:, cut:], window_size_left=WINDOW - 1)
    return lambda: (full(), near())


def _sequences(problem: Attention, lengths: list[int]) -> Call:
    """Runs of neighbouring rows, each a sequence that ends with the run's last row."""
    pool = problem.pool
    k, v = _in_place(problem)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    ends = pool.put(problem.positions)[starts[1:] - 1] + 1
    arguments = {
        "cu_seqlens_q": starts.to(pool.device, torch.int32),
        "seqused_k": ends,
        "max_seqlen_q": max(lengths),
        "max_seqlen_k": pool.tokens,
        "page_table": pool.put(pool.block_table()).expand(len(lengths), -1).contiguous(),
        "is_causal": max(lengths) > 1,
    }
    return _forward(problem.q, k, v, arguments)


def _dense_prefill(problem: Attention) -> Call:
    """Contiguous K, V [T, G, D]: the fastest way it has."""
    pool = problem.pool
    k, v, _ = pool.dense()
    return _causal(problem.q, *(x[0].transpose(0, 1) for x in (k, v)))


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> Call:
    """One sequence whose rows all see what is before them."""
    tokens = len(q)
    both = torch.tensor([0, tokens], dtype=torch.int32, device=q.device)
    arguments = {
        "cu_seqlens_q": both,
        "cu_seqlens_k": both,
        "max_seqlen_q": tokens,
        "max_seqlen_k": tokens,
        "is_causal": True,
        **more,
    }
    return _forward(q.contiguous(), k.contiguous(), v.contiguous(), arguments)


def _one_row_each(table: torch.Tensor, lengths: torch.Tensor, most: int) -> dict[str, Any]:
    rows = len(lengths)
    return {
        "cu_seqlens_q": torch.arange(rows + 1, dtype=torch.int32, device=table.device),
        "seqused_k": lengths,
        "max_seqlen_q": 1,
        "max_seqlen_k": most,
        "page_table": table,
    }


def _scheduled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]
) -> Call:
    schedule = _called(
        "get_scheduler_metadata",
        {
            **arguments,
            "batch_size": len(arguments["seqused_k"]),
            "num_heads": q.shape[1],
            "num_heads_k": k.shape[2],
            "headdim": q.shape[2],
            "headdim_v": q.shape[2],
            "qkv_dtype": q.dtype,
            "page_size": PAGE,
        },
    )()
    return _forward(q, k, v, {**arguments, "scheduler_metadata": schedule})


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> Call:
    scale = q.shape[2] ** -0.5
    call = _called("fwd", {**arguments, "q": q, "k": k, "v": v, "softmax_scale": scale})

    def forward() -> torch.Tensor:
        out: torch.Tensor = call()[0]
        return out

    return forward


def _called(name: str, arguments: dict[str, Any]) -> Call:
    """The op with exactly the arguments that this build of it declares."""
    op = getattr(torch.ops._vllm_fa3_C, name).default
    declared = [argument.name for argument in op._schema.arguments]
    given = [arguments.get(name, DEFAULTS.get(name)) for name in declared]
    return lambda: op(*given)
