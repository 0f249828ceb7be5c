"""Matrices that read the same rows, side by side in memory: one product for all of them.

Queries, keys and values are three products of the same hidden states, gate and up projection two.
On a GPU a decode step's product of a few rows is its launch and the bytes of its weights, and a
small matrix keeps too few of the memory's channels busy. So the weights are laid side by side once,
and the modules' own parameters become views of them: nothing about the model changes but where its
weights lie, and they are there once. Modules are found by structure and proved by numbers; whoever
gives one other weights later, or listens to it, gets the module itself again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FEW_ROWS = 256
"""Rows up to which gate and up are one product: above, their halves apart are read faster."""

_ACT = "act_fn"
_PLAIN_WEIGHTS = (torch.nn.Parameter, torch.Tensor)
_PROVED_ROWS = 16
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""What two orders of summation may be apart by, as a share of the largest element."""


@dataclass(frozen=True)
class Joined:
    """Plain matrices of the same inputs: weight [outputs of all, inputs], bias [outputs of all].

    They are modules of `owner`, by name. `outputs` of each, and `places`, where the weight of each
    began when they were joined.
    """

    owner: torch.nn.Module
    names: tuple[str, ...]
    outputs: tuple[int, ...]
    places: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def modules(self) -> tuple[Any, ...]:
        """What the owner has by these names now."""
        return tuple(getattr(self.owner, name) for name in self.names)

    @property
    def holds(self) -> bool:
        """Whether they are still those matrices, and nobody listens to them."""
        each = zip(self.modules, self.places, strict=True)
        return all(is_plain(one) and one.weight.data_ptr() == place for one, place in each)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What each makes of x [R, inputs]: views of one tensor."""
        made = torch.nn.functional.linear(x, self.weight, self.bias)
        return torch.split(made, list(self.outputs), dim=-1)


@dataclass(frozen=True)
class GatedProducts:
    """A feed-forward of three matrices: down(act(gate(x)) · up(x))."""

    gate_and_up: Joined

    @property
    def down(self) -> torch.nn.Linear:
        """The last matrix."""
        down: torch.nn.Linear = self.gate_and_up.owner.down_proj  # type: ignore[assignment]
        return down

    @property
    def holds(self) -> bool:
        """Whether they are still those matrices, and nobody listens to them or to their owner."""
        return (
            is_unheard(self.gate_and_up.owner)
            and self.gate_and_up.holds
            and is_plain(self.down)
            and self.down.bias is None
        )

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """What the last matrix is given for rows x [R, E]: [R, F]."""
        act: Callable[[torch.Tensor], torch.Tensor] = getattr(self.gate_and_up.owner, _ACT)
        if len(x) <= FEW_ROWS:
            gate, up = self.gate_and_up(x)
            return act(gate).mul_(up)
        gate_of, up_of = self.gate_and_up.modules
        # What the gate gives is let go of before there is room for the other half.
        made = act(gate_of(x))
        return made.mul_(up_of(x))


def is_plain(module: Any) -> bool:
    """Whether a projection is a matrix, and a bias, that nobody listens to."""
    plain = type(module) is torch.nn.Linear and is_plain_weight(module.weight)
    return plain and is_unheard(module)


def is_plain_weight(weight: torch.Tensor) -> bool:
    """Whether a weight is a tensor of its own, and stands for no others as a quantised one may."""
    return type(weight) in _PLAIN_WEIGHTS


def is_unheard(module: Any) -> bool:
    """Whether nobody listens to what a module is given or returns."""
    return not (module._forward_hooks or module._forward_pre_hooks)


def joined(owner: torch.nn.Module, *names: str) -> Joined | None:
    """Moves the weights of plain matrices of one kind side by side; None where they are others."""
    modules: list[Any] = [getattr(owner, name, None) for name in names]
    if not all(is_plain(one) for one in modules if one is not None) or None in modules:
        return None
    weights, biases = [one.weight for one in modules], [one.bias for one in modules]
    if len({(w.shape[1], w.dtype, w.device) for w in weights}) > 1:
        return None
    if len({id(w) for w in weights}) < len(weights) or len({b is None for b in biases}) > 1:
        return None
    weight = _side_by_side(weights)
    bias = None if biases[0] is None else _side_by_side(biases)
    outputs = tuple(len(w) for w in weights)
    return Joined(owner, names, outputs, tuple(w.data_ptr() for w in weights), weight, bias)


def _side_by_side(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """One tensor of all, along their first dimension; they become views of it."""
    if (whole := _already(parameters)) is not None:
        return whole
    # Parameters are used outside of inference mode too.
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([one.detach() for one in parameters])
        parts = torch.split(whole, [len(one) for one in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
    return whole


def _already(parameters: list[torch.nn.Parameter]) -> torch.Tensor | None:
    """The tensor of all where they lie side by side, as another runner of the model left them."""
    first, step = parameters[0], parameters[0].element_size()
    if not all(one.is_contiguous() for one in parameters):
        return None
    at, base = first.data_ptr(), first.untyped_storage().data_ptr()
    for one in parameters:
        if one.data_ptr() != at or one.untyped_storage().data_ptr() != base:
            return None
        at += one.numel() * step
    rows = sum(len(one) for one in parameters)
    shape = (rows, *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def gated(module: torch.nn.Module) -> GatedProducts | None:
    """A feed-forward in its three matrices, where that gives what the module itself gives."""
    down = getattr(module, "down_proj", None)
    if down is None or not callable(getattr(module, _ACT, None)) or not is_plain(down):
        return None
    pair = joined(module, "gate_proj", "up_proj")
    if pair is None:
        return None
    found = GatedProducts(pair)
    if not found.holds:
        return None
    weight = pair.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(_PROVED_ROWS, weight.shape[1], generator=generator, device=weight.device)
    x = x.to(weight.dtype)
    own, ours = module(x[None])[0], down(found.inner(x))
    if not isinstance(own, torch.Tensor) or own.shape != ours.shape:
        return None
    apart = float((own - ours).abs().max() / own.abs().max().clamp_min(1e-6))
    return found if apart <= _TOLERANCE[weight.dtype] else None
