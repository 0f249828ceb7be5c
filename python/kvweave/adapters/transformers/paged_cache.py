"""`PagedCache`: a cache of transformers whose keys and values lie in kvweave's pages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import Cache

from kvweave.adapters.transformers.attention import NAME, STEP, register
from kvweave.adapters.transformers.cache_argument import (
    CACHE_NAMES,
    cache_argument,
    given_cache,
)
from kvweave.adapters.transformers.cache_pools import CacheForm
from kvweave.adapters.transformers.equality import Proof
from kvweave.adapters.transformers.forward_rows import ForwardRows
from kvweave.adapters.transformers.kv_geometry import kv_geometry
from kvweave.adapters.transformers.live_rows import LiveRows
from kvweave.adapters.transformers.moved_keys import MovedKeys
from kvweave.adapters.transformers.packed_step import PackedStep
from kvweave.adapters.transformers.page_pool import Marks
from kvweave.adapters.transformers.paged_step import PagedStep
from kvweave.adapters.transformers.ranked_rows import RankedRows
from kvweave.arguments import shown, whole, word
from kvweave.cache import KvCache, ReusePlan
from kvweave.closing import Closing
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.ops import PackedFormat
from kvweave.policies import Policy
from kvweave.runner.kv.block_counts import block_counts
from kvweave.runner.kv.packing import Packing
from kvweave.runner.model.rounding import expect_rounding
from kvweave.runner.prompt import Prompt, PromptTokenizer, token_array

_MOST_MARKED = 1024
_TAKEN = {
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", *CACHE_NAMES),
    *("labels", "logits_to_keep", "num_items_in_batch"),
}
"""Arguments of a forward that may hold tensors: others, such as images, are part of the text."""


class PagedCache(Cache, Closing):
    """Keys and values of a transformers model in kvweave's pages, for `model.generate`.

        with kvweave.PagedCache(model, max_tokens=8192) as cache:
            model.generate(**inputs, cache=cache, max_new_tokens=32)

    (Below 5.24 transformers takes it as `past_key_values`.) Hand the same cache to every call: a
    prompt is computed from where it differs from what any earlier one had, and what `mark` names is
    reused at any position, by the `policy` (one that computes the same rows in all layers: full,
    prefix, naive, random, epic). With `discover` text that nobody marked is too. Without marks and
    `discover` answers are those of the model's own attention, but for rounding. With
    `top_k_pages` each KV head of a layer without a window reads so many pages in a decode step, at
    least 3: the first, the newest two, and of the others those that its query scores highest.

    `kv_dtype`, a name of `ops.packed_format`, a format or a `Packing`: of each row the first 64
    tokens and the newest 128 stay exact, and the full pages of 64 between them are packed, layer by
    layer as a forward goes. There are exact tokens of `max_rows` rows then, and prompts are found
    in whole packed pages. A basis is made of the first 512 tokens that are packed, where none is
    given. `top_k_pages` are packed pages then, and all that is exact is read besides. Segments are
    for caches of exact pages.

    While it is open the model attends by `attn_implementation="kvweave"`, and by what it had before
    once the cache is closed; one cache is open for a model at a time, used by one thread. The
    weights must stay as they are. `max_tokens` (32768) or `arena_bytes` sizes the arena; `eviction`
    as for `KvCache`. `check` compares a short random prompt with the model's own forward.

    # Errors
    `Unsupported` for a model that attends otherwise, naming what nothing here has a form of, or
    whose logits differ; `InvalidArgument` for wrong settings, a model in train mode;
    `DeviceUnavailable` and `OutOfMemory` for its device. A forward raises `PoolFull` when its rows
    do not fit, and those of `ForwardRows`; the rows before it are given back then.
    """

    @needs_memory("cache")
    def __init__(
        self,
        model: Any,
        *,
        max_tokens: int | None = None,
        arena_bytes: int | None = None,
        page_tokens: int = 16,
        policy: str | Policy = "epic",
        discover: bool = False,
        eviction: str = "lru",
        kv_dtype: str | PackedFormat | Packing | None = None,
        max_rows: int = 4,
        top_k_pages: int | None = None,
        check: bool = True,
    ) -> None:
        super().__init__(layers=[])
        self._geometry = geometry = kv_geometry(model)
        _expect_closed(model)
        self._form = form = CacheForm.of(
            geometry,
            page_tokens=page_tokens,
            policy=policy,
            discover=discover,
            eviction=eviction,
            kv_dtype=kv_dtype,
            top_k_pages=top_k_pages,
            max_rows=max_rows,
        )
        self._arguments = list(inspect.signature(model.forward).parameters)
        self._taken_as = cache_argument(model.forward)
        self._marks: dict[bytes, Marks] = {}
        self._step: PagedStep | PackedStep | None = None
        self._ranked: RankedRows | None = None
        self._hooks: list[Any] = []
        self._model = model
        register()
        self._before = model.config._attn_implementation
        try:
            own = "eager" if self._before == NAME else self._before
            self._attend_by(own)
            self._keys = MovedKeys.of(model, geometry.layers, check)
            if check:
                proof = Proof.of(model, geometry)
                self._attach()
                small = form.exact_pool(geometry, self._keys.rope, proof.blocks(page_tokens))
                self._live = LiveRows(small)
                logits = proof.sent(model, self), proof.logits
                self._live.release()
                self._detach()
                self._attend_by(own)
                expect_rounding(model, proof.ids[0], logits, _check_copy)
            self._attach()
            pool = form.pool(geometry, self._keys.rope, max_tokens, arena_bytes)
            self._live = LiveRows(pool)
            if top_k_pages is not None and pool.packed is None:
                self._ranked = RankedRows(pool, top_k_pages)
            if discover:
                self._keys.expect()
        except BaseException:
            self._detach()
            raise

    def _attend_by(self, implementation: str) -> None:
        if self._model.config._attn_implementation != implementation:
            self._model.set_attn_implementation(implementation)
        if self._model.config._attn_implementation != implementation:
            raise Unsupported(
                f"model {type(self._model).__name__}: expected one whose attention is chosen by "
                "transformers' AttentionInterface, got one that has its own"
            )

    # ---- prompts --------------------------------------------------------------------------

    def inputs(self, tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
        """What `generate` takes for a prompt of text and segments, which are marked.

            model.generate(**cache.inputs(tokenizer, ["Use this: ", Segment(text=manual), "…"]))

        Each part is tokenised alone, so a segment has the same tokens in every prompt.

        # Errors
        As `mark`, and for a prompt `InvalidArgument` as `Runner.tokenize`.
        """
        made = PromptTokenizer(tokenizer, self._geometry.vocabulary).tokenize(prompt)
        if made.segments:
            self.mark(made.tokens, made.segments)
        ids = torch.from_numpy(made.tokens).long()[None].to(self._geometry.device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            self._taken_as: self,
        }

    def mark(self, tokens: Any, segments: Sequence[Sequence[Any]]) -> None:
        """Names the segments of a prompt, by its token ids [T]: (start, end) each, half-open.

        They hold whenever this very prompt is generated for, for the latest 1024 prompts. What of
        a segment was read anywhere before is reused; the policy says which tokens are computed all
        the same. A third element is the namespace of a segment.

        # Errors
        `InvalidArgument` for ids or spans that are none; `Unsupported` for a model whose keys
        nothing here can move, saying why.
        """
        self._form.expect_exact("segments")
        self._keys.expect()
        ids = token_array(_listed(tokens), self._geometry.vocabulary)
        spans = tuple(_span(segment, len(ids)) for segment in segments)
        self._marks.pop(ids.tobytes(), None)
        self._marks[ids.tobytes()] = spans
        while len(self._marks) > _MOST_MARKED:
            del self._marks[next(iter(self._marks))]

    # ---- what is there --------------------------------------------------------------------

    @property
    def kv(self) -> KvCache:
        """The cache itself, of exact pages where others are packed: `stats()`, `check()`."""
        return self._live.pool.cache

    @property
    def packed(self) -> KvCache | None:
        """The allocator of packed pages; None without any."""
        packed = self._live.pool.packed
        return None if packed is None else packed.cache

    @property
    def bytes(self) -> int:
        """Bytes of the pages that the rows hold, exact and packed, of bases, and of bounds."""
        pool = self._live.pool
        held = int(self.kv.stats()["held"]) * self.kv.block_bytes + self._exact_bounds
        return held + (0 if pool.packed is None else pool.packed.held_bytes)

    @property
    def arena_bytes(self) -> int:
        """Bytes of all that there is room for."""
        pool = self._live.pool
        packed = 0 if pool.packed is None else pool.packed.nbytes
        return pool.pages.nbytes + packed + self._exact_bounds

    @property
    def dense_bytes(self) -> int:
        """What the rows would take as tensors, each with all of its tokens."""
        geometry = self._geometry
        heads, size = geometry.layers * geometry.kv_heads, geometry.dtype.itemsize
        return sum(self.lengths) * heads * 2 * geometry.head_dim * size

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row of the batch that was generated for last."""
        return self._live.lengths

    @property
    def plans(self) -> list[ReusePlan]:
        """What was reused of the latest prompts, one a row, from where, and why not the rest."""
        return self._live.plans

    @property
    def bound_bytes(self) -> int:
        """Bytes of bounds, by which decode steps choose pages, beside those of the pages."""
        packed = self._live.pool.packed
        if packed is not None and packed.bounds is not None:
            return packed.bounds.nbytes
        return self._exact_bounds

    @property
    def _exact_bounds(self) -> int:
        return 0 if self._ranked is None else self._ranked.nbytes

    def __repr__(self) -> str:
        rows = f"rows={len(self.lengths)}, tokens={sum(self.lengths)}"
        return f"PagedCache({rows}, {block_counts(self.kv, self.packed)})"

    # ---- transformers' cache --------------------------------------------------------------

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """The new keys and values as they are: the attention writes them where they belong.

        # Errors
        `InvalidArgument` outside a forward of the model that the cache was made for.
        """
        if self._step is None:
            raise InvalidArgument(
                "cache: expected an open cache of this very model, got one that is "
                "closed, or of another model"
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0, so that `generate` hands over whole prompts: what is there is not computed.

        `lengths` says how many tokens the rows have.
        """
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Those of the new rows alone: no mask is made of the others."""
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """−1: a row may be as long as there is room."""
        return -1

    @property
    def is_croppable(self) -> bool:
        """False: tokens are not taken back."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Takes nothing back.

        # Errors
        `Unsupported` for any number but 0.
        """
        if tokens_to_remove:
            raise Unsupported(f"crop: expected 0 tokens to remove, got {tokens_to_remove}")

    def activate_past_recording(self) -> None:
        """For assisted decoding, which takes tokens back.

        # Errors
        `Unsupported`, always.
        """
        raise Unsupported(
            "generate: expected decoding that keeps its tokens, got assisted decoding, "
            "which takes some back"
        )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was; blocks are shared until they are written."""
        self._live.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one beside the other."""
        count = range(len(self.lengths))
        self._live.select([row for row in count for _ in range(whole("repeats", repeats, 1))])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some rows."""
        count = torch.arange(len(self.lengths))
        self._live.select(count[indices.cpu()].tolist())

    def reset(self) -> None:
        """Gives the rows back; their text stays cached for later prompts."""
        self._live.release()
        self._step = None

    def close(self) -> None:
        """Gives everything back, and the model its own attention; safe to call twice."""
        self.reset()
        self._detach()

    # ---- forwards -------------------------------------------------------------------------

    def _before_forward(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        if given_cache(given) is not self:
            return None
        others = sorted(k for k, v in given.items() if k not in _TAKEN and _holds_tensors(v))
        if others:
            raise Unsupported(f"forward: expected text alone, got {', '.join(others)}")
        if module.config._attn_implementation != NAME:
            got = module.config._attn_implementation
            raise InvalidArgument(
                f'attn_implementation: expected "{NAME}", which an open PagedCache sets, got {got}'
            )
        if self._step is not None:
            # The forward before this one raised: what it was to compute is not there.
            self._live.release()
            self._step = None
        self._step = self._begun(ForwardRows.of(given))
        changed = {
            "input_ids": self._step.ids,
            "position_ids": self._step.positions,
            "attention_mask": None,
            STEP: self._step,
        }
        return (), {**given, **changed}

    def _begun(self, rows: ForwardRows) -> PagedStep | PackedStep:
        for tokens in rows.tokens:
            token_array(tokens, self._geometry.vocabulary)
        wanted = [min(rows.wanted, len(tokens)) for tokens in rows.tokens]
        live, ranked, begins = self._live, None, rows.begins(self._live.lengths)
        if begins:
            marks = [self._marks.get(tokens.tobytes(), ()) for tokens in rows.tokens]
            written = live.begin(rows.tokens, marks)
        else:
            # A prompt's own rows read all, also where all but one of them were there before.
            ranked = self._ranked
            written = live.append(rows.tokens, exact=self._form.top_k_pages is None)
        columns = rows.columns if rows.wanted == rows.columns else 0
        try:
            if (packed := live.pool.packed) is not None:
                return PackedStep(live, packed, written, wanted, columns, not begins)
            return PagedStep(live, written, wanted, columns, ranked)
        except BaseException:
            live.release()
            raise

    def _after_forward(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._step is None or kwargs.get(STEP) is not self._step:
            return
        if isinstance(self._step, PackedStep):
            self._step.done()
        self._live.done()
        self._step = None

    def _attach(self) -> None:
        self._attend_by(NAME)
        before = self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        after = self._model.register_forward_hook(self._after_forward, with_kwargs=True)
        self._hooks = [before, after]

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._model.config._attn_implementation != self._before:
            self._model.set_attn_implementation(self._before)


def _expect_closed(model: Any) -> None:
    """Refuses a model that another cache is open for: what that set would be left behind."""
    hooks = model._forward_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), PagedCache) for hook in hooks):
        raise InvalidArgument(
            "model: expected one without an open PagedCache, got one that has it: close() it first"
        )


def _check_copy(exact: Any) -> None:
    """Refuses a model whose copy in float32 differs over pages from its own attention."""
    PagedCache(exact, max_tokens=1).close()


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


def _listed(tokens: Any) -> Any:
    """Ids of one prompt without the batch that they may come in."""
    array = tokens.detach().cpu().numpy() if isinstance(tokens, torch.Tensor) else tokens
    one = isinstance(array, np.ndarray) and array.ndim == 2 and len(array) == 1
    return array[0] if one else array


def _span(segment: Any, tokens: int) -> tuple[int, int, str]:
    if not isinstance(segment, Sequence) or isinstance(segment, str) or len(segment) not in (2, 3):
        raise InvalidArgument(f"segment: expected (start, end), got {shown(segment)}")
    start = whole("segment", segment[0], 0, name="start")
    end = whole("segment", segment[1], start + 1, tokens, name="end")
    return start, end, word("segment namespace", segment[2]) if len(segment) == 3 else ""
