"""Proof at start-up that our forward is the model's own: a short random prompt through both."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from kvweave.cache import KvCache, KvShape
from kvweave.errors import Unsupported
from kvweave.plan import PromptView
from kvweave.policies.full import Full
from kvweave.runner.executor import Executor
from kvweave.runner.model_spec import KV_DTYPES, ModelSpec
from kvweave.runner.rope import position_table

TOKENS = 24
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Largest difference of a logit, as a share of the largest logit."""


def verify(model: Any, spec: ModelSpec) -> None:
    """Compares logits of every position of a random prompt.

    # Errors
    `Unsupported` when they differ: the model's layer does something this package does not know.
    """
    shape = KvShape(len(spec.layers), spec.kv_heads, spec.head_dim, 16, KV_DTYPES[spec.dtype])
    cache = KvCache(shape, blocks=4)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocabulary, (TOKENS,), generator=generator).to(spec.device)
    request = cache.admit(tokens.int().numpy(), reuse="none")
    positions = position_table(spec, TOKENS)
    rows = request.plan.rows()
    view = PromptView(TOKENS, len(spec.layers), 16, 0, rows, ())
    executor = Executor(spec, from_dlpack(cache.arena), False)
    hidden, _ = executor.prefill(request, tokens, positions, Full().plan(view))
    ours = executor.logits(hidden, 0)
    theirs = model(tokens[None], use_cache=False).logits[0].float()
    request.release()
    apart = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))
    if not apart <= TOLERANCE[spec.dtype]:
        raise Unsupported(
            f"model {type(model).__name__}: expected our forward to give its own logits "
            f"within {TOLERANCE[spec.dtype]:g} of their size, got {apart:.3g}"
        )
