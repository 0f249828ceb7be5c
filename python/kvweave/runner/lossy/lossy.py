"""What a runner does about policies that approximate: profiles, one warning, and a canary."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvweave.arguments import shown
from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument, PolicySwitchedOff, UncertifiedPolicy
from kvweave.policies import DEFAULT_POLICY, Policy, is_exact, policy_of
from kvweave.policies.policy_profile import PolicyProfile
from kvweave.policies.policy_text import title_of
from kvweave.runner.caller import caller_level
from kvweave.runner.conversation.turns import follow
from kvweave.runner.decode import Decoder
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.loop import decode_steps
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.lossy.canary import Canary, CanaryWatch
from kvweave.runner.model.model_spec import ModelSpec
from kvweave.runner.prefill.lookup import Lookup, Room
from kvweave.runner.prefill.prefill import Prefiller
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.prompt import TokenizedPrompt


def check_profile(
    profile: PolicyProfile | None,
    canary: Canary | None,
    spec: ModelSpec,
    heads: HeadClassMap | None,
) -> HeadClassMap | None:
    """Raises what a runner of this model and head map has against a profile and a canary.

    Returns the head map that the runner is to have: the one that was asked for, else the profile's.

    # Errors
    `CorruptProfile` for a profile of another model, dtype or head map; `InvalidArgument` for what
    is neither, and for a canary without a bound where no profile states one of KL.
    """
    for what, given, kind in (("profile", profile, PolicyProfile), ("canary", canary, Canary)):
        if given is not None and not isinstance(given, kind):
            raise InvalidArgument(f"{what}: expected a {kind.__name__}, got {shown(given)}")
    if profile is not None:
        profile.check(spec.fingerprint, str(spec.dtype).removeprefix("torch."), heads)
    if canary is not None:
        bound_of(canary, profile)
    return profile.heads if heads is None and profile is not None else heads


def bound_of(canary: Canary, profile: PolicyProfile | None) -> float:
    """The canary's bound in nats a token, else the profile's; raises InvalidArgument for none."""
    if canary.bound is not None:
        return canary.bound
    if profile is not None and profile.bound.kind == "kl":
        return profile.bound.value
    raise InvalidArgument("canary: expected a bound, or a profile that states one of KL, got none")


class LossyPrefiller:
    """Prefills prompts of callers: by the profile's policy unless they name one, and watched.

    A policy that approximates without a profile is told of once. What the canary has switched off
    is answered by full.
    """

    def __init__(
        self,
        prefiller: Prefiller,
        decoder: Decoder,
        profile: PolicyProfile | None,
        canary: Canary | None,
    ) -> None:
        self._prefiller = prefiller
        self._certified = None if profile is None else profile.chosen
        self._told = False
        self.canary = (
            None
            if canary is None
            else CanaryWatch(
                canary,
                bound_of(canary, profile),
                partial(_continued, decoder),
                partial(_extended, prefiller),
            )
        )

    def policy_of(self, policy: str | Policy | None) -> Policy:
        """What is asked for, or by default; raises InvalidArgument as `kvweave.policies`.

        Beside packed pages that is `prefix`, which reuses no segments.
        """
        if policy is not None:
            return policy_of(policy)
        if self._prefiller.packed is not None:
            return policy_of("prefix")
        return policy_of(DEFAULT_POLICY) if self._certified is None else self._certified

    def prefill(
        self,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
        *,
        logits_from: int | None = None,
        reserve_tokens: int = 0,
    ) -> Prefill:
        """Like `Prefiller.prefill`; a prompt that took approximate KV may be compared with full."""
        room = Room(logits_from=logits_from, reserve_tokens=reserve_tokens)

        def computed(chosen: Policy) -> Prefill:
            return self._prefiller.prefill(prompt, chosen, lookup, **room)

        return self._watched(prompt, policy, lookup, computed)

    def follow(
        self,
        live: Prefill,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
        *,
        logits_from: int | None = None,
        reserve_tokens: int = 0,
    ) -> Prefill:
        """Like `turns.follow`, watched as `prefill` is: each turn is a request of the canary's.

        Where the policy was switched off and earlier turns took approximate KV, the whole
        conversation is computed anew by full, once.
        """
        room = Room(logits_from=logits_from, reserve_tokens=reserve_tokens)

        def computed(chosen: Policy) -> Prefill:
            if chosen is not policy and not live.exact:
                return self._prefiller.prefill(prompt, chosen, lookup, **room)
            return follow(self._prefiller, live, prompt, chosen, lookup, **room)

        return self._watched(prompt, policy, lookup, computed)

    def _watched(
        self,
        prompt: TokenizedPrompt,
        policy: Policy,
        lookup: Lookup,
        computed: Callable[[Policy], Prefill],
    ) -> Prefill:
        """What is computed by a policy, or by full where that was switched off."""
        chosen, off = self.chosen(policy)
        done = computed(chosen)
        try:
            self.look_after(prompt, policy, lookup, done, off)
        except BaseException:
            done.release()
            raise
        return done

    def chosen(self, policy: Policy) -> tuple[Policy, str]:
        """The policy to compute by: full where the canary has switched it off, and why then."""
        off = "" if self.canary is None else self.canary.reason(policy)
        return (policy_of("full") if off else policy), off

    def look_after(
        self, prompt: TokenizedPrompt, policy: Policy, lookup: Lookup, done: Prefill, off: str
    ) -> None:
        """What follows a prefill by what was `chosen`: it may be compared with full.

        Where that was switched off the report says so. On errors the prompt is to be released.
        """
        if off:
            done.report.mode_reason = "; ".join(filter(None, (done.report.mode_reason, off)))
        elif not is_exact(policy) and not done.exact:
            self._look_after(prompt, policy, lookup, done)

    def _look_after(
        self, prompt: TokenizedPrompt, policy: Policy, lookup: Lookup, done: Prefill
    ) -> None:
        if policy != self._certified and not self._told:
            self._told = True
            warnings.warn(
                f"policy {title_of(policy)} is used without a profile of it: how far its answers "
                "are from full prefill on this model is not known; run: kvweave certify MODEL",
                UncertifiedPolicy,
                stacklevel=caller_level(),
            )
        if self.canary is None:
            return
        by_full = partial(
            self._prefiller.prefill,
            prompt,
            policy_of("full"),
            Lookup(lookup.namespace, remember=False),
            reserve_tokens=self.canary.settings.tokens,
        )
        if self.canary.watch(policy, done, by_full):
            warnings.warn(
                f"{self.canary.reason(policy)}; full answers from now on",
                PolicySwitchedOff,
                stacklevel=caller_level(),
            )


@torch.inference_mode()
def _continued(decoder: Decoder, full: Prefill, tokens: int) -> list[int]:
    """The most likely tokens behind a prompt, decoded from a fork of it."""
    with full.fork() as fork:
        sequence = Decoding(
            request=fork.request,
            positions=fork.positions,
            sampling=Sampling(),
            limit=tokens,
            device=decoder.spec.device,
            timings=fork.report.timings,
        )
        sequence.choose(full.logits[-1])
        for _ in decode_steps(decoder, [sequence]):
            pass
        return sequence.tokens


def _extended(prefiller: Prefiller, done: Prefill, tokens: list[int]) -> torch.Tensor:
    return prefiller.extend(done, np.asarray(tokens, np.int32))
