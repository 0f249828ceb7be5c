"""Proof at start-up that our forward is the model's own: a short random prompt through both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvweave.errors import Unsupported
from kvweave.plan import PromptView
from kvweave.policies.full import Full
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.kv.pages import make_cache
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.model.model_spec import ModelSpec
from kvweave.runner.model.rope import Rotary
from kvweave.runner.prefill.executor import Executor

TOKENS = 24
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Largest difference of a logit, as a share of the largest logit."""


def verify(model: Any, spec: ModelSpec) -> None:
    """Compares logits of every position of a random prompt.

    # Errors
    `Unsupported` when they differ: the model's layer does something this package does not know.
    """
    cache, pages = make_cache(spec, 16, blocks=4)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, spec.vocabulary, (TOKENS,), generator=generator)
    request = cache.admit(ids.int().numpy(), reuse="none")
    tokens, positions = ids.to(spec.device), Rotary(spec).table(TOKENS)
    rows = request.plan.rows()
    heads = np.zeros((len(spec.layers), spec.kv_heads, 2), np.int32)
    view = PromptView(TOKENS, len(spec.layers), 16, 0, rows, (), heads)
    kv = RequestKv(HeadReads(spec, cache), pages, request, positions)
    ours, _ = Executor(spec, False).prefill(kv, tokens, Full().plan(view), 0)
    theirs = model(tokens[None], use_cache=False).logits[0].float()
    request.release()
    apart = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))
    if not apart <= TOLERANCE[spec.dtype]:
        raise Unsupported(
            f"model {type(model).__name__}: expected our forward to give its own logits "
            f"within {TOLERANCE[spec.dtype]:g} of their size, got {apart:.3g}"
        )
