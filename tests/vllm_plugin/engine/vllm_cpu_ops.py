"""vLLM's compiled CPU ops in plain torch, for a vLLM that was built for GPUs.

Not every version of vLLM has a build for CPUs. `VLLM_TARGET_DEVICE=cpu` makes any build choose the
CPU platform, which then misses the ops of its own: those that tests reach are defined here, by what
vLLM's sources say they do. A build that has them keeps its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

_LIBRARY: list[torch.library.Library] = []


def define() -> None:
    """Defines the ops if this vLLM came without; may be called any number of times."""
    if _LIBRARY or _compiled():
        return
    library = torch.library.Library("_C", "FRAGMENT")
    _LIBRARY.append(library)
    for schema, made in OPS.items():
        library.define(schema)
        library.impl(schema.split("(")[0], made, "CompositeExplicitAutograd")


def _compiled() -> bool:
    found = importlib.util.find_spec("vllm")
    folders = [] if found is None else found.submodule_search_locations or []
    names = {path.name.split(".")[0] for folder in folders for path in Path(folder).glob("*.so")}
    return bool(names & {"_C", "_C_AVX2", "_C_AVX512"})


def options() -> dict[str, Any]:
    """What an engine is told where these ops stand in: torch's form of each layer that has one."""
    return {"compilation_config": {"custom_ops": ["none"]}} if _LIBRARY else {}


def slot_mapping(
    query_start: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    slots: torch.Tensor,
    block_tokens: int,
) -> None:
    """The slot of each row: its block's number times the block's tokens, and its place there."""
    counts = np.diff(query_start.numpy())
    rows = int(counts.sum())
    requests = np.repeat(np.arange(len(counts)), counts)
    page, place = np.divmod(positions[:rows].numpy(), block_tokens)
    found = slots.numpy()
    found[:rows] = blocks.numpy()[requests, page].astype(found.dtype) * block_tokens + place
    found[rows:] = -1


def gated(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """Half of the columns through `act`, times the other half."""

    def op(out: torch.Tensor, x: torch.Tensor) -> None:
        left, right = x.chunk(2, dim=-1)
        out.copy_(act(left) * right)

    return op


def sampled(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """A token a row by its probability: the largest logit with Gumbel noise of the row's seed."""
    noise = torch.empty_like(logits)
    for row, seed in zip(noise, seeds.tolist(), strict=True):
        row.exponential_(generator=torch.Generator().manual_seed(seed))
    return (logits - noise.log()).argmax(-1)


def verified(
    out: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    wanted: torch.Tensor,
    beyond: torch.Tensor,
    greedy: torch.Tensor | None,
    most: int,
) -> None:
    """Of each request its likeliest tokens up to the first draft that is another, that included.

    Drafts and `wanted` [rows], requests one after another up to `ends`; where all are the same the
    one of `beyond` follows. `out` [requests, most + 1] keeps what is behind.
    """
    assert greedy is None
    start = 0
    for request, end in enumerate(ends.tolist()):
        others = (drafts[start:end] != wanted[start:end]).nonzero()[:, 0]
        count = int(others[0]) + 1 if len(others) else end - start
        out[request, :count] = wanted[start : start + count]
        if not len(others):
            out[request, count] = beyond[request]
        start = end


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *others: Any,
) -> None:
    """key and value [R, G, D] into caches [blocks, G, P, D]; what has a negative slot nowhere."""
    rows = (slots >= 0).nonzero()[:, 0]
    block, place = slots[rows] // keys.shape[2], slots[rows] % keys.shape[2]
    keys[block, :, place] = key[rows].to(keys.dtype)
    values[block, :, place] = value[rows].to(values.dtype)


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    query_start: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    causal: bool,
    alibi: torch.Tensor | None,
    window: int,
    blocks: torch.Tensor,
    softcap: float,
    plan: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *others: Any,
) -> None:
    """Causal attention over paged caches, request by request; `window` −1 means none.

    `sinks` [H]: of each head the logit of a key that has no value.
    """
    assert causal
    assert alibi is None
    page, group = keys.shape[2], query.shape[1] // keys.shape[1]
    ends = query_start.tolist()
    for request, (first, last) in enumerate(pairwise(ends)):
        length = int(lengths[request])
        held = blocks[request, : -(-length // page)].long()
        k, v = (x[held].transpose(1, 2).flatten(0, 1)[:length].float() for x in (keys, values))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("rhd,khd->hrk", query[first:last].float(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length - (last - first), length)[:, None]
        seen = torch.arange(length) <= at
        if window >= 0:
            seen &= torch.arange(length) > at - window
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            of_rows = sinks.float()[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat([scores, of_rows], -1)
        weights = scores.softmax(-1)[..., :length]
        output[first:last] = torch.einsum("hrk,khd->rhd", weights, v).to(output.dtype)


def linear(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    packed: bool,
) -> None:
    """x [R, K] times weight [N, K], as CPUs with AMX tiles are asked for it; the bias is f32."""
    out.copy_(functional.linear(x.float(), weight.float(), bias))


def as_it_is(weight: torch.Tensor, out: torch.Tensor, isa: str) -> None:
    """Weights of experts are read as a checkpoint has them."""
    out.copy_(weight)


def experts(
    out: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    unweighted: bool,
    act: str,
    isa: str,
) -> None:
    """Of each row the experts that it chose, by their weights; x [N, D], chosen [N, K].

    `unweighted`: the row has its expert's weight already. Biases [E, ·] or none.
    """
    out.zero_()
    for row, place in torch.ones_like(chosen).nonzero().tolist():
        expert = int(chosen[row, place])
        both = functional.linear(x[row], gate_up[expert], _row_of(gate_up_bias, expert))
        said = functional.linear(GATED[act](both), down[expert], _row_of(down_bias, expert))
        out[row] += said if unweighted else (weights[row, place] * said).to(out.dtype)


def _row_of(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]


def silu_gated(both: torch.Tensor) -> torch.Tensor:
    """The half in front gates the other."""
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up


def swiglu_of_gpt_oss(both: torch.Tensor) -> torch.Tensor:
    """Gates and what they gate by turns, both bounded by 7, as GPT-OSS has them."""
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_gated,
    "swigluoai": swiglu_of_gpt_oss,
}


OPS: dict[str, Callable[..., Any]] = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "convert_weight_packed(Tensor weight) -> Tensor": torch.clone,
    "weight_packed_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, bool packed)"
    " -> ()": linear,
    "prepack_moe_weight(Tensor weight, Tensor(a!) out, str isa) -> ()": as_it_is,
    "cpu_fused_moe(Tensor(a!) out, Tensor x, Tensor gate_up, Tensor down, Tensor? a, Tensor? b,"
    " Tensor weights, Tensor chosen, bool unweighted, str act, str isa) -> ()": experts,
    "greedy_argmax(Tensor x) -> Tensor": lambda x: x.argmax(-1),
    "fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor": sampled,
    "rejection_greedy_sample_kernel_impl(Tensor(a!) out, Tensor ends, Tensor drafts, Tensor wanted,"
    " Tensor beyond, Tensor? greedy, SymInt most) -> ()": verified,
    "silu_and_mul(Tensor(a!) out, Tensor x) -> ()": gated(functional.silu),
    "gelu_tanh_and_mul(Tensor(a!) out, Tensor x) -> ()": gated(
        lambda x: functional.gelu(x, approximate="tanh")
    ),
    "compute_slot_mapping_kernel_impl(Tensor a, Tensor b, Tensor c, Tensor(a!) d, int tokens)"
    " -> ()": slot_mapping,
    "get_scheduler_metadata(int requests, int heads, int kv_heads, int size, Tensor lengths,"
    " ScalarType dtype, Tensor start, bool causal, int window, str isa, bool split,"
    " Tensor? dynamic, str kind) -> Tensor": lambda *given: torch.zeros(1),
    "cpu_attn_reshape_and_cache(Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values,"
    " Tensor slots, str isa, float k_scale, float v_scale, str kind) -> ()": write_cache,
    "cpu_attention_with_kv_cache(Tensor q, Tensor keys, Tensor values, Tensor(a!) out,"
    " Tensor start, Tensor lengths, float scale, bool causal, Tensor? alibi, int window,"
    " Tensor blocks, float softcap, Tensor? plan, Tensor? sinks, Tensor? dynamic, float k_scale,"
    " float v_scale, str kind) -> ()": attention,
}
