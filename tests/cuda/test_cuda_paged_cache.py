"""`generate` of transformers through pages on a GPU: near the model's own attention there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvweave
from cache_names import by_name
from families import tiny
from generated import padded, prompt_ids, said
from versions import needs_cuda

pytestmark = needs_cuda

NEAR = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
"""Largest difference of a logit, as a share of the largest."""


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
