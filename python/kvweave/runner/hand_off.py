"""Prefill here, decode there: a prefilled prompt as a payload, and back."""

from __future__ import annotations

import time
from typing import Any

import torch

from kvweave.arguments import shown
from kvweave.cache import KvRequest
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument
from kvweave.payload import KvPayload, export_kv, import_kv
from kvweave.payload.transfer import import_exact
from kvweave.runner.answers.answering import Answering
from kvweave.runner.answers.stop import Stops
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.engine.calls import Calls
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.kv.resumed_pages import ResumedPages, expect_packed_alike
from kvweave.runner.kv.reused_tokens import ReusedTokens
from kvweave.runner.kv.sent_pages import packed_tokens
from kvweave.runner.prefill.lookup import Lookup
from kvweave.runner.prefill.prefill import Prefiller
from kvweave.runner.prefill.prefilled import Prefill, live_prefill
from kvweave.runner.prompt import token_array
from kvweave.runner.report import Generation, Report, Timings


class HandOff:
    """What a `Runner` does with prompts that are decoded elsewhere than they are prefilled."""

    _prefiller: Prefiller
    _answering: Answering
    _calls: Calls

    def export(self, done: Prefill) -> KvPayload:
        """What another runner of the same model and head map needs to decode from here on.

        # Errors
        `InvalidArgument` for a prompt that was released or has been decoded from.
        """
        with self._prefiller.computing:
            return hand_over(self._prefiller, live_prefill("export", done))

    def resume(
        self,
        payload: KvPayload,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Stops | None = None,
        namespace: str | None = None,
    ) -> Generation:
        """Decodes a prompt that another runner prefilled; its KV is not kept for later prompts.

        `namespace`: whose prompt is expected (None: the payload's word is taken). The report tells
        of the import alone.

        # Errors
        `InvalidArgument` for a payload of another model, map or vocabulary, `NamespaceConflict`
        for one of another namespace, `PoolFull` when it does not fit; nothing is held then.
        """
        given: Any = payload
        if not isinstance(given, KvPayload):
            raise InvalidArgument(f"payload: expected a KvPayload, got {shown(given)}")
        lookup = Lookup(payload.header.namespace, remember=False)
        ask = self._answering.ask("full", lookup, max_new_tokens, sampling, stop)
        with (
            self._prefiller.computing,
            take_over(self._prefiller, payload, namespace, max_new_tokens - 1) as done,
        ):
            return self._calls.answer(done, ask)


@needs_memory("export")
@torch.inference_mode()
def hand_over(prefiller: Prefiller, done: Prefill) -> KvPayload:
    """The KV of a prefilled prompt and its last logits; the prompt stays as it is.

    # Errors
    `InvalidArgument` for a prompt that was released, or that tokens were appended to.
    """
    if done.request.length != done.report.tokens:
        raise InvalidArgument(
            f"prefill: expected the {done.report.tokens} tokens of the prompt, "
            f"got {done.request.length}"
        )
    packed, tokens = done.kv.packed, done.report.tokens
    return export_kv(
        prefiller.cache,
        prefiller.pages,
        done.request,
        rope=done.positions.rope,
        logits=done.logits[-1],
        packed=None if packed is None else packed_tokens(packed, tokens),
    )


@needs_memory("resume")
@torch.inference_mode()
def take_over(
    prefiller: Prefiller, payload: KvPayload, namespace: str | None, reserve_tokens: int
) -> Prefill:
    """A prompt that was prefilled elsewhere, as if it had been prefilled here.

    # Errors
    As `import_kv`; `InvalidArgument` as well for ids or logits of another vocabulary, keys rotated
    by other frequencies, a payload without logits, or packed pages of another format or head map.
    """
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
    request, packed = _admitted(prefiller, payload, namespace, reserve_tokens)
    own, shared = request.kv_bytes()
    if packed is not None:
        in_packed = packed.kv_bytes()
        own, shared = own + in_packed[0], shared + in_packed[1]
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
    kv = RequestKv(prefiller.heads, prefiller.pages, request, positions, packed=packed)
    lookup = Lookup(request.namespace, remember=False)
    return Prefill(kv, logits, report, lookup, 0, ReusedTokens.of(()))


def _admitted(
    prefiller: Prefiller, payload: KvPayload, namespace: str | None, reserve_tokens: int
) -> tuple[KvRequest, ResumedPages | None]:
    """The request of a payload, and its packed tokens where there are packed pages."""
    pool, cache = prefiller.packed, prefiller.cache
    known = cache, prefiller.pages, payload
    if pool is None:
        return import_kv(*known, namespace=namespace, reserve_tokens=reserve_tokens), None
    header = expect_packed_alike(pool, payload.header.packed)
    request = import_exact(*known, namespace, reserve_tokens)
    try:
        return request, ResumedPages(pool, cache, payload, header, reserve_tokens)
    except BaseException:
        request.release()
        raise
