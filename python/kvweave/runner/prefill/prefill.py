"""`Prefiller`: brings the KV of prompts into the pages, and appends tokens to prompts there."""

from __future__ import annotations

import numpy as np
import torch

from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument, PoolFull
from kvweave.plan import one_pass
from kvweave.policies import Policy
from kvweave.runner.decode import Decoder
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.kv.tables import Int32, send_index
from kvweave.runner.prefill.lookup import Lookup
from kvweave.runner.prefill.parted_job import PartedJob, may_part, part_tokens
from kvweave.runner.prefill.prefill_context import PrefillContext
from kvweave.runner.prefill.prefill_job import PrefillJob
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.tiers.final_packing import TextCopy
from kvweave.runner.tiers.tiers import Tiers


class Prefiller(PrefillContext):
    """Prefills prompts of one model into one cache.

    `chunk_tokens`, if any, are computed at once for policies that measure nothing. Beside packed
    pages there are always some: exact pages have no room for more. `zeroes`: whether what freed
    blocks held is overwritten.
    """

    def __init__(
        self,
        decoder: Decoder,
        tiled: bool,
        mode: str,
        chunk_tokens: int | None,
        tiers: Tiers | None = None,
        zeroes: bool | None = None,
    ) -> None:
        super().__init__(decoder, tiled, mode, tiers, bool(zeroes))
        self.chunk_tokens = self.packed.chunk_tokens if self.packed is not None else chunk_tokens

    def prefill(
        self,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
        *,
        logits_from: int | None = None,
        reserve_tokens: int = 0,
        keep: bool = False,
        copy: TextCopy | None = None,
    ) -> Prefill:
        """Brings a prompt's KV into the pages.

        `keep`: all of it stays with the request, also what lies behind the windows of its heads.
        `copy` is given the pages that are packed. Beside host memory a prompt for which the device
        has no room is computed in parts: see `PartedJob`; nothing is reserved behind it then.

        # Errors
        `PoolFull` when it does not fit. After any error the request holds nothing.
        """
        self.warn_of_length(len(prompt.tokens) + reserve_tokens)
        job: PrefillJob
        try:
            job = PrefillJob(
                self,
                prompt,
                policy,
                lookup,
                self.chunk_tokens or 0,
                logits_from=logits_from,
                reserve_tokens=reserve_tokens,
                keep=keep,
                copy=copy,
                at_once=True,
            )
        except PoolFull:
            if keep or copy is not None or not may_part(self, policy):
                raise
            part = part_tokens(self, self.chunk_tokens or 0)
            job = PartedJob(self, prompt, policy, lookup, part, logits_from=logits_from)
        job.advance(job.tokens)
        return job.finish()

    @needs_memory("extend")
    @torch.inference_mode()
    def extend(self, done: Prefill, tokens: Int32) -> torch.Tensor:
        """Appends tokens to a prefilled prompt: their logits f32 [n, V], all in one pass.

        A token that was decoded and has no KV yet goes before them. `done.logits` are the last
        one's then.

        # Errors
        `InvalidArgument` without tokens, or where the frequencies of RoPE change with the length;
        `PoolFull` when they do not fit. Nothing has changed then. After `OutOfMemory` the prompt is
        to be released.
        """
        request = done.request
        new = np.concatenate((np.asarray(done.pending, np.int32), tokens))
        if len(new) == 0:
            raise InvalidArgument("extend: expected at least one token, got none")
        length = request.length + len(new)
        positions = self.rotary.table(length)
        if positions.regime != done.positions.regime:
            raise InvalidArgument(
                f"extend: expected RoPE frequencies that hold for {length} tokens too, "
                f"got those of {done.report.tokens} alone"
            )
        packed = done.kv.packed
        if packed is not None:
            packed.pack(request, request.length)
        done.bring_back()
        request.append(new)
        done.pending = []
        with self.spec.current():
            parts = done.kv.rotates, packed, done.kv.host
            kv = RequestKv(self.heads, self.pages, request, positions, *parts)
            kv.copy()
            rows, first = kv.newest(len(new)), length - max(1, len(tokens))
            ids = send_index(self.spec.device, request.tokens).long()
            plans = one_pass(len(self.spec.layers), rows)
            logits, _ = self.executor.prefill(kv, ids, plans, first)
        done.kv, done.logits = kv, logits[-1:]
        return logits
