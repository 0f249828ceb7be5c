"""`Runner`: a transformers causal LM whose KV lives in kvweave's pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any

import torch

from kvweave import models
from kvweave.arguments import flag, real, several, whole, word
from kvweave.cache import HeadClassMap, cuda_status
from kvweave.device_memory import needs_memory
from kvweave.ops import PackedFormat
from kvweave.policies import Policy
from kvweave.policies.policy_profile import PolicyProfile
from kvweave.remote import RemoteStore
from kvweave.runner.answers.answering import Answering
from kvweave.runner.answers.beam_search import Beam, Breadth, search
from kvweave.runner.answers.stop import Stops
from kvweave.runner.chat import Messages, chat_prompt
from kvweave.runner.conversation.conversation import Conversation
from kvweave.runner.decode import Decoder
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.engine.calls import Calls
from kvweave.runner.engine.engine import Engine
from kvweave.runner.hand_off import HandOff
from kvweave.runner.healing import Healing, check_healing
from kvweave.runner.knowledge import Knowledge
from kvweave.runner.knowledge_base import KnowledgeBase
from kvweave.runner.kv.beside_drafts import check_drafting, check_speculate
from kvweave.runner.kv.beside_host import HostMemory
from kvweave.runner.kv.beside_packed import check_kv_dtype
from kvweave.runner.kv.block_counts import block_counts
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.kv.host_pool import make_host_pools
from kvweave.runner.kv.packing import Packing
from kvweave.runner.kv.pages import make_pools
from kvweave.runner.lossy.canary import Canary, CanaryWatch
from kvweave.runner.lossy.lossy import LossyPrefiller, check_profile
from kvweave.runner.model.fused_norms import with_fused_norms
from kvweave.runner.model.joined_layers import with_joined_products
from kvweave.runner.model.layer import needs_tiling
from kvweave.runner.model.model_spec import describe
from kvweave.runner.model.place import check_place
from kvweave.runner.model.rope import Rotary
from kvweave.runner.model.sampled_weights import of_weights
from kvweave.runner.prefill.lookup import Lookup
from kvweave.runner.prefill.prefill import Prefiller
from kvweave.runner.prefill.prefilled import Prefill, live_prefill
from kvweave.runner.prefill.verify import verify
from kvweave.runner.prompt import Prompt, PromptTokenizer, Segment, TokenizedPrompt, token_array
from kvweave.runner.report import Generation, StreamedToken
from kvweave.runner.retention import Retention
from kvweave.runner.serve.server import Server
from kvweave.runner.settings import check_settings
from kvweave.runner.tiers.make import form_of, make_tiers
from kvweave.store import Store


class Runner(KnowledgeBase, Retention, HandOff):
    """Prefill and decode through kvweave, for any transformers decoder-only model with RoPE.

    `max_tokens` (32768) or `arena_bytes` sizes the arena: tokens that fit at once. `kv_dtype`: None
    for the model's own dtype, or a format ("int4", "int8", "half-int4", "quarter-bf16", "planes-3",
    "planes-2.5", an `ops.PackedFormat` or a `Packing`) in which full pages are packed, into the
    pool `packed` (docs/packed-kv.md). `host_bytes`: of the host's memory for pages that top_k heads
    of `heads` seldom read, in the pools `host` (None: none). Requests are spilled there while less
    of the device's pages are free than `host_free_share` (None: half of them; 1: always).
    `host_copies`: "spill" copies there what frees room, "mirror" all pages as they fill;
    `host_dtype`: None as they are, "fp8" in a byte a number; `host_arrivals`: "late" has no step
    wait for pages that it chose, "whole" its request sit steps out till they are there, "exact"
    the step itself wait (None: late, but exact beside `speculate`);
    `host_ahead_bytes`: of it, what is touched and pinned before it is needed (None: a GiB on a
    GPU). `bounds_dtype`: what top_k heads choose pages by is kept as keys are (None), or in "fp8".
    `speculate`: tokens that a round drafts by the pages of top_k heads and verifies by all, so that
    answers are dense (docs/sparse-decode.md). `store`, a `Store` or its folder: documents are
    written there and read; `document_bytes`: host memory for documents whose blocks leave the
    device; `remote`: a store on another machine behind these (docs/tiers.md).
    `zero_on_free`: what blocks held that went back is overwritten (docs/SECURITY.md). `mode` is
    "materialise" (reused KV is copied and rotated to its place) or "share" (read where it lies,
    queries rotated). `eviction` ("lru", "cost-aware", "s3-fifo" or "lfu") orders what is cached
    where room is wanted; by cost `retain` and `demote` say what is known. `cache.set_quota` says
    what a namespace may keep. `profile` (see `kvweave certify`) states the policy of whoever names
    none and, without `heads`, the head map; `canary` compares a share of live requests with `full`.
    `check` first compares our forward with the model's. Pages and logits lie where the model does.

    # Errors
    `Unsupported` for a model, dtype or device without support, one whose forward differs, or what
    does not go with packed pages or host memory; `CorruptHeadMap` for a map, `CorruptProfile` for a
    profile of another model, dtype or head map, `ForeignStore` for a folder of another model;
    `DeviceUnavailable` for a model on a GPU that the kernels cannot use; `OutOfMemory` for an arena
    that its device cannot hold. Every method that computes raises `OutOfMemory` too, when a pass
    finds no room beside the arena; it holds nothing then.

    One thread computes with a runner at a time. Every method that computes raises
    `AlreadyStepping` while another thread does, or a server serves the runner: see `serve`.
    """

    @needs_memory("runner")
    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        *,
        arena_bytes: int | None = None,
        max_tokens: int | None = None,
        page_tokens: int = 16,
        kv_dtype: str | PackedFormat | Packing | None = None,
        host_bytes: int | None = None,
        host_copies: str = "spill",
        host_dtype: str | None = None,
        host_arrivals: str | None = None,
        host_ahead_bytes: int | None = None,
        host_free_share: float | None = None,
        bounds_dtype: str | None = None,
        store: Store | str | PathLike[str] | None = None,
        document_bytes: int | None = None,
        remote: RemoteStore | None = None,
        zero_on_free: bool = False,
        hash: str = "xxh3-128",
        mode: str = "materialise",
        frozen_share: float = 0.5,
        eviction: str = "lru",
        heads: HeadClassMap | None = None,
        speculate: int | None = None,
        chunk_tokens: int | None = None,
        profile: PolicyProfile | None = None,
        canary: Canary | None = None,
        progress: bool = True,
        check: bool = True,
    ) -> None:
        self.spec = describe(model)
        check_place(self.spec.dtype, self.spec.device)
        check_settings(page_tokens, chunk_tokens, mode, heads, bounds_dtype)
        how_kept = (host_copies, host_dtype, host_arrivals, host_ahead_bytes, host_free_share)
        over = HostMemory(host_bytes, *how_kept)
        over.check(kv_dtype)
        zeroes = flag("zero_on_free", zero_on_free) or None
        packing = check_kv_dtype(kv_dtype, profile=profile, canary=canary, zero_on_free=zeroes)
        heads = of_weights(check_profile(profile, canary, self.spec, heads), model)
        asked = {"kv_dtype": kv_dtype, "host_arrivals": host_arrivals}
        drafts = check_speculate(speculate, heads, page_tokens, **asked)
        how: dict[str, Any] = {"packing": packing, "chunk_tokens": chunk_tokens, "heads": heads}
        how |= {"arena_bytes": arena_bytes, "max_tokens": max_tokens, "hash": word("hash", hash)}
        how |= {"frozen_share": real("frozen_share", frozen_share)}
        how |= {"eviction": word("eviction", eviction)}
        self.cache, pages, self.packed = make_pools(self.spec, page_tokens, **how)
        self.host = make_host_pools(self.cache, pages, over.beside_drafts(speculate))
        self.heads, self.progress, self.eviction = heads, progress, eviction
        self.prompts = PromptTokenizer(tokenizer, self.spec.vocabulary)
        rotary = Rotary(self.spec)
        with torch.inference_mode(), self.spec.current():
            if self.spec.device.type == "cuda":
                self.spec = with_joined_products(with_fused_norms(self.spec))
            tiled = needs_tiling(self.spec)
            if check:
                verify(model, self.spec)
        kinds = {"verified": drafts > 0, "fp8_bounds": bounds_dtype == "fp8"}
        reads = HeadReads(self.spec, self.cache, self.packed, self.host, **kinds)
        check_drafting(drafts, reads, rotary)
        self._decoder = Decoder(reads, rotary, pages, drafts)
        self.tiers = make_tiers(self._decoder, store, document_bytes, heads, eviction, hash, remote)
        self._prefiller = Prefiller(self._decoder, tiled, mode, chunk_tokens, self.tiers, zeroes)
        self._lossy = LossyPrefiller(self._prefiller, self._decoder, profile, canary)
        self._answering = Answering(self._lossy, self._prefiller, self._decoder, self.prompts)
        self._calls = Calls(self._answering)
        self._knowledge = Knowledge(self._prefiller, form_of(self._decoder, heads))

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> Runner:
        """A runner of a model by name, with its tokenizer; `settings` as for `Runner`.

        `name` as for `kvweave.models.load`: a packaged model, a folder, or a name on the Hugging
        Face hub. `device`: a GPU if there is one that the kernels can use, else the CPU.

        # Errors
        As `Runner`, and `ModelUnavailable` for a model that is not to be had, saying why.
        """
        usable = cuda_status().startswith("available") and torch.cuda.is_available()
        place = device or ("cuda" if usable else "cpu")
        model, tokenizer = models.load(name, dtype, device=place)
        return cls(model, tokenizer, **settings)

    def __repr__(self) -> str:
        spec, packed = self.spec, None if self.packed is None else self.packed.cache
        model = f"{len(spec.layers)} layers, {spec.kv_heads} KV heads, {spec.dtype}, {spec.device}"
        return f"Runner({model}; {block_counts(self.cache, packed)})"

    @property
    def canary(self) -> CanaryWatch | None:
        """What compares live requests with full, and its `state`; None without one."""
        return self._lossy.canary

    # ---- prefill --------------------------------------------------------------------------

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """The tokens of a prompt and its marked segments; each part is tokenised alone."""
        return self.prompts.tokenize(prompt)

    def prefill(
        self,
        prompt: Prompt,
        policy: str | Policy | None = None,
        *,
        logits_from: int | None = None,
        namespace: str = "",
        discover: bool = False,
        reserve_tokens: int = 0,
        remember: bool = True,
        watched: bool = True,
    ) -> Prefill:
        """Brings a prompt's KV into the pages and returns its logits.

        `logits_from`: first position whose logits are wanted (default: the last alone); every
        position from there on must be computed by the policy. `discover` also matches unmarked
        text by its content. `reserve_tokens`: room set aside for decode. `remember` lets later
        prompts of the namespace find this one's blocks; comparisons of policies switch it off, and
        `watched` too: then no canary looks on, and nothing is said about a missing profile.

        # Errors
        `InvalidArgument` for an empty prompt or ids out of range; `PoolFull` when it does not
        fit, nothing having been taken.
        """
        prefiller = self._lossy if flag("watched", watched) else self._prefiller
        with self._prefiller.computing:
            return prefiller.prefill(
                self.tokenize(prompt),
                self._lossy.policy_of(policy),
                Lookup(namespace, discover, remember),
                logits_from=logits_from,
                reserve_tokens=whole("reserve_tokens", reserve_tokens, 0),
            )

    def extend(self, done: Prefill, tokens: Sequence[int]) -> torch.Tensor:
        """Appends tokens to a prefilled prompt and computes them in one pass: logits f32 [n, V].

        Row i says what follows tokens[i]. So a known continuation is scored in one pass instead of
        a decode step a token.

        # Errors
        `InvalidArgument` for no tokens, ids out of range, or a model whose RoPE frequencies change
        with the length; `PoolFull` when they do not fit, the prompt being as before.
        """
        live_prefill("extend", done)
        with self._prefiller.computing:
            return self._prefiller.extend(done, token_array(tokens, self.spec.vocabulary))

    # ---- generation -----------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        policy: str | Policy | None = None,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Stops | None = None,
        namespace: str = "",
        discover: bool = False,
        remember: bool = True,
        healing: Healing | None = None,
    ) -> Generation:
        """Prefills a prompt by a policy and decodes up to `max_new_tokens`.

        `stop`: strings and token ids that end the answer. Its text ends before them; `tokens` has
        them. Strings may stand across the borders of tokens. By default, and where strings alone
        are named, the tokenizer's end of sequence ends it too. `healing`: reused tokens that the
        answer comes to look at are recomputed while it is decoded; what is to be remembered of the
        prompt then is so from its end on. `namespace`: whose prefixes are found and kept; a marked
        segment is looked for in its own.
        """
        return self.generate_batch(
            [prompt],
            policy,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            namespace=namespace,
            discover=discover,
            remember=remember,
            healing=healing,
        )[0]

    def chat(
        self,
        messages: Messages,
        documents: Sequence[str | Segment] = (),
        policy: str | Policy | None = None,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Stops | None = None,
        namespace: str = "",
        discover: bool = False,
        remember: bool = True,
        healing: Healing | None = None,
    ) -> Generation:
        """Answers a chat in the tokenizer's template, and reuses what is known of its documents.

        `messages`: one question, or `{"role": …, "content": …}` in order, whose contents are text
        or parts. `documents` stand before what the last one says, each a segment: one that was
        inserted, or read in an earlier prompt, is found wherever it stands. All else as for
        `generate`.

        # Errors
        As for `generate` and `chat_prompt`.
        """
        return self.generate(
            chat_prompt(self.prompts.tokenizer, messages, documents),
            policy,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            namespace=namespace,
            discover=discover,
            remember=remember,
            healing=healing,
        )

    def decode(
        self,
        done: Prefill,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Stops | None = None,
        healing: Healing | None = None,
    ) -> Generation:
        """Decodes on from a prefilled prompt, which stays: `extend` and `decode` may follow.

        `healing` as for `generate`, of a prompt that was prefilled with `remember=False`.

        # Errors
        `InvalidArgument` for a prompt that was released, or one to be healed that others may find;
        `PoolFull` when the answer does not fit, what was decoded so far being kept.
        """
        lookup = live_prefill("decode", done).lookup
        ask = self._answering.ask("full", lookup, max_new_tokens, sampling, stop, healing)
        generation = self._calls.answer(done, ask)
        done.commit()
        return generation

    def search(
        self,
        done: Prefill,
        *,
        beams: int = 4,
        max_new_tokens: int = 64,
        length_penalty: float = 1.0,
        stop: Stops | None = None,
    ) -> list[Beam]:
        """The likeliest answers to a prefilled prompt by so many beams, the best first.

        Beams are forks of it: it stays as it is, and its blocks are shared. They are compared by
        the sum of their log-probabilities over their length to the power of `length_penalty`, and
        go on until no beam can do better. `stop`: token ids, as for `generate`.

        # Errors
        `InvalidArgument` for a prompt that was released, strings in `stop`, no beams; `PoolFull`
        where they find no room. Nothing of them is held then.
        """
        lookup = live_prefill("search", done).lookup
        ask = self._answering.ask("full", lookup, max_new_tokens, None, stop)
        with self._prefiller.computing:
            return search(self._answering, done, ask, Breadth(beams, length_penalty))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        policy: str | Policy | None = None,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Stops | None = None,
        namespace: str = "",
        discover: bool = False,
        remember: bool = True,
        healing: Healing | None = None,
    ) -> list[Generation]:
        """Prefills the prompts one by one, then decodes them together.

        Those that find no room beside the others are answered when these have ended.

        # Errors
        `PoolFull` when one of them does not fit; everything taken is given back.
        """
        several("prompts", prompts, "prompts")
        lookup = Lookup(namespace, discover, remember, late=healing is not None)
        named = (policy, lookup, max_new_tokens, sampling, stop, healing)
        ask = self._answering.ask(*named, reserve=True)
        tokenized = [self.tokenize(prompt) for prompt in prompts]
        return self._calls.answers(tokenized, ask, progress=self.progress)

    def stream(
        self,
        prompt: Prompt,
        policy: str | Policy | None = None,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Stops | None = None,
        namespace: str = "",
        discover: bool = False,
        remember: bool = True,
        healing: Healing | None = None,
    ) -> Iterator[StreamedToken]:
        """Like `generate`, token by token; closing the iterator gives the blocks back.

        The texts of all tokens together are the answer's. What may be half a character, or the
        beginning of a string that ends the answer, is held back until that is known.
        """
        lookup = Lookup(namespace, discover, remember, late=healing is not None)
        named = (policy, lookup, max_new_tokens, sampling, stop, healing)
        ask = self._answering.ask(*named, streamed=True, reserve=True)
        return self._calls.streamed(self.tokenize(prompt), ask)

    def engine(
        self,
        *,
        token_budget: int | None = 8192,
        chunk_tokens: int | None = 2048,
        max_running: int | None = 256,
        order: str = "arrival",
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> Engine:
        """An engine that answers many requests by this runner, step by step: see `Engine`."""
        return Engine(
            self._answering,
            token_budget=token_budget,
            chunk_tokens=chunk_tokens,
            max_running=max_running,
            order=order,
            clock=clock,
        )

    def serve(
        self,
        *,
        token_budget: int | None = 8192,
        chunk_tokens: int | None = 2048,
        max_running: int | None = 256,
        order: str = "arrival",
    ) -> Server:
        """A thread that steps an engine for callers in any thread, until closed: see `Server`.

        # Errors
        As for `engine`; `AlreadyStepping` while another thread computes with this runner, or
        another server serves it.
        """
        engine = self.engine(
            token_budget=token_budget,
            chunk_tokens=chunk_tokens,
            max_running=max_running,
            order=order,
        )
        return Server(engine, self._prefiller.computing)

    def conversation(
        self,
        policy: str | Policy | None = None,
        *,
        namespace: str = "",
        discover: bool = False,
        remember: bool = True,
        healing: Healing | None = None,
        watched: bool = True,
    ) -> Conversation:
        """Several turns over one live request: what one of them recomputed serves the next.

        Use it in a `with` block, or close it. `remember` lets later prompts of the namespace find
        the conversation once it is closed; `healing` as for `generate`, `watched` as for `prefill`.
        """
        check_healing(healing)
        lookup = Lookup(namespace, discover, remember, late=True)
        chosen, seen = self._lossy.policy_of(policy), flag("watched", watched)
        return Conversation(self._answering, chosen, lookup, healing, seen)
