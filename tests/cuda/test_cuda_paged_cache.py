"""`generate` of transformers through pages on a GPU: near the model's own attention there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvweave
from cache_names import by_name
from families import tiny
from generated import padded, prompt_ids, said
from kvweave.packed_page import PAGE_TOKENS
from versions import needs_cuda

pytestmark = needs_cuda

NEAR = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
"""Largest difference of a logit, as a share of the largest."""
BASES = {"int8": 0, "half-int4": 2, "planes-3": 4}
"""Bases of both rows of a batch and of what is cached."""
BASIS_BYTES = 266_240


def there(family: str, dtype: torch.dtype) -> Any:
    sizes = {"head_dim": 64, "hidden_size": 256}
    return tiny(family, **sizes).to("cuda", dtype)


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_logits_are_near_the_models_own(family: str, dtype: torch.dtype) -> None:
    """Over a cached prefix, of appended tokens, and in a padded batch."""
    model = there(family, dtype)
    ids, other = (prompt_ids(count, count).cuda() for count in (300, 41))
    batch = {name: table.cuda() for name, table in padded(ids.cpu(), other.cpu()).items()}
    whole = model(ids, use_cache=False).logits.float()
    rows = model(**batch, use_cache=False).logits[:, -1].float()
    with kvweave.PagedCache(model, max_tokens=2048) as cache:
        model(ids[:, :200], **by_name(model, cache))
        cache.reset()
        ours = model(ids[:, :290], **by_name(model, cache), logits_to_keep=1).logits.float()
        assert cache.plans[0].reused_prefix == 200
        parts = ids[:, 290:299].split([7, 1, 1], 1)
        more = [model(part, **by_name(model, cache)).logits.float() for part in parts]
        cache.reset()
        last = model(**batch, **by_name(model, cache), logits_to_keep=1).logits[:, -1].float()
        cache.kv.check()
    for got, wanted in (
        (ours, whole[:, 289:290]),
        (torch.cat(more, 1), whole[:, 290:299]),
        (last, rows),
    ):
        assert float((got - wanted).abs().max() / wanted.abs().max()) < NEAR[dtype]


def test_generate_says_the_same_in_f32() -> None:
    model = there("llama", torch.float32)
    ids = prompt_ids(60, 1).cuda()
    options = {"num_beams": 3, "num_return_sequences": 2}
    theirs = said(model, ids), said(model, ids, **options)
    with kvweave.PagedCache(model, max_tokens=1024) as cache:
        ours = said(model, ids, cache=cache)
        assert (ours, said(model, ids, cache=cache, **options)) == theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", ["int8", "half-int4", "planes-3"])
def test_packed_pages_are_near_exact_ones(kv_dtype: str, dtype: torch.dtype) -> None:
    """A prompt, one that goes on behind its packed pages, and steps of a batch."""
    model = there("llama", dtype)
    ids, other = (prompt_ids(count, count).cuda() for count in (700, 90))
    near = {"int8": 0.1, "half-int4": 0.6, "planes-3": 0.6}[kv_dtype]
    made = []
    for form in (None, kv_dtype):
        with kvweave.PagedCache(model, max_tokens=4096, kv_dtype=form) as cache:
            known, logits = by_name(model, cache), []
            for count in (640, 690):
                cache.reset()
                logits += [model(ids[:, :count], **known, logits_to_keep=1).logits[0]]
            parts = ids[:, 690:700].split([7, 1, 1, 1], 1)
            logits += [model(part, **known).logits[0] for part in parts]
            batch = {n: t.cuda() for n, t in padded(ids.cpu(), other.cpu()).items()}
            cache.reset()
            logits += [model(**batch, **known, logits_to_keep=1).logits[:, -1]]
            made.append(torch.cat(logits).float())
            if cache.packed is not None:
                assert cache.plans[0].reused_prefix == 640
                # Most is packed; the bases of so small a model are larger than its pages.
                held, exact = cache.packed.stats(), cache.kv.stats()["held"] * cache.kv.block_bytes
                assert exact < 0.5 * cache.dense_bytes
                assert held["held"] * PAGE_TOKENS >= 640
                bases = BASES[kv_dtype] * BASIS_BYTES
                packed = held["held"] * cache._live.pool.packed.block_bytes
                assert cache.bytes == exact + packed + bases
                cache.packed.check()
    assert 0 < float((made[1] - made[0]).abs().max() / made[0].abs().max()) < near
