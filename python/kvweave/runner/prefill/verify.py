"""Proof at start-up that our forward is the model's own: a short random prompt through both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvweave.plan import PromptView
from kvweave.policies.full import Full
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.kv.pages import make_cache
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.model.model_spec import ModelSpec, describe
from kvweave.runner.model.rope import Rotary
from kvweave.runner.model.rounding import expect_rounding, own_logits
from kvweave.runner.prefill.executor import Executor

TOKENS = 24


@torch.inference_mode()
def verify(model: Any, spec: ModelSpec) -> None:
    """Compares logits of every position of a random prompt; `spec` is the model's.

    # Errors
    `Unsupported` when they differ by more than rounding: the model's layer does something this
    package does not know.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, spec.vocabulary, (TOKENS,), generator=generator).to(spec.device)
    logits = _our_logits(spec, ids), own_logits(model, ids)
    expect_rounding(model, ids, logits, lambda exact: verify(exact, describe(exact)))


def _our_logits(spec: ModelSpec, ids: torch.Tensor) -> torch.Tensor:
    """What our forward says of a prompt i64 [T]: f32 [T, V]."""
    cache, pages = make_cache(spec, 16, blocks=4)
    request = cache.admit(ids.int().cpu().numpy(), reuse="none")
    positions = Rotary(spec).table(TOKENS)
    rows = request.plan.rows()
    heads = np.zeros((len(spec.layers), spec.kv_heads, 2), np.int32)
    view = PromptView(TOKENS, len(spec.layers), 16, 0, rows, (), heads)
    kv = RequestKv(HeadReads(spec, cache), pages, request, positions)
    logits, _ = Executor(spec, False).prefill(kv, ids, Full().plan(view), 0)
    request.release()
    return logits
