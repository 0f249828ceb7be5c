"""Prefill here, decode there: a prefilled prompt as a payload, and back."""

from __future__ import annotations

import time

import torch

from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument
from kvweave.payload import KvPayload, export_kv, import_kv
from kvweave.runner.kv.beside_packed import refuse_beside_packed
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.kv.reused_tokens import ReusedTokens
from kvweave.runner.prefill.lookup import Lookup
from kvweave.runner.prefill.prefill import Prefiller
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.prompt import token_array
from kvweave.runner.report import Report, Timings


@needs_memory("export")
@torch.inference_mode()
def hand_over(prefiller: Prefiller, done: Prefill) -> KvPayload:
    """The KV of a prefilled prompt and its last logits; the prompt stays as it is.

    # Errors
    `InvalidArgument` for a prompt that was released, or that tokens were appended to;
    `Unsupported` beside packed pages.
    """
    refuse_beside_packed(prefiller.packed, "payloads")
    if done.request.length != done.report.tokens:
        raise InvalidArgument(
            f"prefill: expected the {done.report.tokens} tokens of the prompt, "
            f"got {done.request.length}"
        )
    return export_kv(
        prefiller.cache,
        prefiller.pages,
        done.request,
        rope=done.positions.rope,
        logits=done.logits[-1],
    )


@needs_memory("resume")
@torch.inference_mode()
def take_over(
    prefiller: Prefiller, payload: KvPayload, namespace: str | None, reserve_tokens: int
) -> Prefill:
    """A prompt that was prefilled elsewhere, as if it had been prefilled here.

    # Errors
    As `import_kv`; `InvalidArgument` as well for ids or logits of another vocabulary, keys rotated
    by other frequencies, or a payload without logits.
    """
    refuse_beside_packed(prefiller.packed, "payloads")
    start = time.perf_counter()
    header, spec = payload.header, prefiller.spec
    token_array(payload.tokens.cpu().numpy(), spec.vocabulary)
    positions = prefiller.rotary.table(header.tokens)
    if header.regime != positions.regime:
        raise InvalidArgument(
            f"payload regime: expected {positions.regime}, the frequencies of {header.tokens} "
            f"tokens here, got {header.regime}"
        )
    if payload.logits is None or payload.logits.numel() != spec.vocabulary:
        got = "none" if payload.logits is None else payload.logits.numel()
        raise InvalidArgument(f"payload logits: expected {spec.vocabulary} of them, got {got}")
    logits = payload.logits.to(spec.device)[None]
    request = import_kv(
        prefiller.cache,
        prefiller.pages,
        payload,
        namespace=namespace,
        reserve_tokens=reserve_tokens,
    )
    own, shared = request.kv_bytes()
    report = Report(
        policy="payload",
        plan=request.plan,
        tokens=header.tokens,
        reused_prefix=0,
        reused_segment=0,
        recomputed=0,
        mode="materialise",
        timings=Timings(copy_s=time.perf_counter() - start),
        kv_bytes=own,
        shared_kv_bytes=shared,
    )
    kv = RequestKv(prefiller.heads, prefiller.pages, request, positions)
    lookup = Lookup(request.namespace, remember=False)
    return Prefill(kv, logits, report, lookup, 0, ReusedTokens.of(()))
