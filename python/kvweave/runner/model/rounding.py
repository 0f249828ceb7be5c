"""Whether two forwards of a model differ by rounding alone, where each rounds coarsely.

In a deep model of 16-bit numbers two attentions that are both right may give logits a tenth of
their size apart, and one that is wrong no more. So a copy of the model in float32 says what both
should have given: one that is right in float32, and in 16 bits no further from that than the
model's own forward is, rounds. Weights that have no float32 (quantised ones), or no room for a
copy, leave the spread between the model's own attentions to go by.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from kvweave.device_memory import is_shortage
from kvweave.errors import Unsupported
from kvweave.runner.model.joined import is_plain_weight

MOST_TIMES = 2.0
"""How many times as far as the model's own forward ours may be, root mean square. Two roundings of
the same numbers were measured between 0.8 and 1.2 times as far as each other."""
WIDEST_SPREAD = 0.25
"""Without a copy: the largest difference between a model's own attentions, as a share of the
largest logit, that still tells it from another model."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Largest difference of a logit, as a share of the largest logit, that is not asked about."""


def largest_apart(ours: torch.Tensor, own: torch.Tensor) -> float:
    """The largest difference of a logit, as a share of the largest of `own`; NaN stays NaN."""
    return float((ours - own).abs().max() / own.abs().max().clamp_min(1e-6))


def own_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What a model itself says of a prompt i64 [T]: f32 [T, V]."""
    logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    return logits


def expect_rounding(
    model: Any,
    ids: torch.Tensor,
    logits: tuple[torch.Tensor, torch.Tensor],
    check_copy: Callable[[Any], None],
) -> None:
    """Accepts logits (ours, the model's own), f32 [T, V] of ids [T], that differ by rounding.

    `check_copy` raises `Unsupported` where our forward of a copy in float32 differs from its own.

    # Errors
    `Unsupported` when they differ by more.
    """
    ours, own = logits
    dtype, name = model.get_input_embeddings().weight.dtype, type(model).__name__
    apart = largest_apart(ours, own)
    if apart <= TOLERANCE[dtype]:
        return
    said = (
        f"model {name}: expected our forward to give its own logits within "
        f"{TOLERANCE[dtype]:g} of their size, got {apart:.3g}"
    )
    if dtype is torch.float32 or not torch.isfinite(ours).all():
        raise Unsupported(said)
    exact = _in_float32(model)
    if exact is None:
        _expect_within_spread(model, ids, logits, said)
        return
    check_copy(exact)
    wanted = own_logits(exact, ids)
    far, own_far = _root_mean_square(ours - wanted), _root_mean_square(own - wanted)
    if not far <= MOST_TIMES * own_far:
        raise Unsupported(f"{said}, {far / own_far:.3g} times as far from float32 as its own are")


def _root_mean_square(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _in_float32(model: Any) -> Any | None:
    """A copy of a model with float32 weights; None where there is no such copy, or no room."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    stored = [
        value for name, value in model.state_dict(keep_vars=True).items() if name not in weights
    ]
    if not all(is_plain_weight(w) and w.is_floating_point() for w in weights.values()) or stored:
        return None
    try:
        # What stands for each tensor in the copy, so that none is copied in 16 bits first.
        known: dict[int, Any] = {
            id(w): torch.nn.Parameter(w.detach().float(), requires_grad=False)
            for w in model.parameters()
        }
        known |= {id(b): b.float() for b in model.buffers() if b.is_floating_point()}
        return copy.deepcopy(model, known)
    except RuntimeError as error:
        if is_shortage(error):
            return None
        raise


def _expect_within_spread(
    model: Any, ids: torch.Tensor, logits: tuple[torch.Tensor, torch.Tensor], said: str
) -> None:
    """The same by what the model's own two attentions are apart."""
    ours, own = logits
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("sdpa" if before == "eager" else "eager")
        other = own_logits(model, ids)
    except Exception as error:
        raise Unsupported(f"{said}; and it has one attention alone: {error}") from error
    finally:
        model.set_attn_implementation(before)
    spread = largest_apart(other, own)
    near = _root_mean_square(ours - own) <= MOST_TIMES * _root_mean_square(other - own)
    if not near or not spread <= WIDEST_SPREAD:
        raise Unsupported(f"{said}, where its own two attentions are {spread:.3g} apart")
