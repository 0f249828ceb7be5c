"""Answers under a load beside those of a quiet engine: what may differ, and how far.

In float32 a batch changes rounding alone: log-probabilities may be `TOLERANCE` apart, and another
token may be said where the quiet engine's two likeliest tokens are no further apart than that, in
`MOST_TIES` of the answers at most. A policy that chooses rows is answered by what was found, how
the prompt was cut, and whether it was preempted: it is compared where these are the same as in
quiet. Rounding may then choose another row, in `MOST_CHOSEN` of the answers at most. Without reuse,
whatever happened, an answer has to be the quiet engine's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.vllm.soak_engine import SEGMENTS, TOLERANCE, Served

MOST_TIES, MOST_CHOSEN = 0.01, 0.01
FEWEST, ENOUGH = 0.1, 20
"""The share of each kind that must be comparable, where so many were asked."""


class Comparison:
    """Counts answers that are the same, and keeps those that are not.

    `served`: what the engine has. `records`: all of the load. A document that one of them had to
    compute may have been found by others as it was computed there, behind other text.
    """

    def __init__(self, records: list[dict[str, Any]], served: Served = SEGMENTS) -> None:
        self.served = served
        self.lost = {number for r in records if _missed(r) for number in r["documents"]}
        self.counts: Counter[str] = Counter()
        self.apart: dict[str, float] = {"exact": 0.0, "reused": 0.0}
        self.different: list[str] = []

    def add(self, record: dict[str, Any], alone: dict[str, Any]) -> None:
        """A request of the load and what the quiet engine says to it."""
        kind = record["kind"]
        self.counts[f"{kind} asked"] += 1
        exact = kind in self.served.exact
        if not exact:
            computed = None if self.lost & {*record["documents"]} else _computed(record)
            if computed is None or computed != _computed(alone):
                return
        self.counts[f"{kind} compared"] += 1
        for number, own in enumerate(record["answers"]):
            verdict = self.verdict(own, alone["answers"][number], exact=exact)
            self.counts[verdict] += 1
            if verdict == "different":
                self.counts[f"{kind} different"] += 1
                self.different.append(f"{record['name']} ({kind}, answer {number})")

    def verdict(self, own: dict[str, Any], alone: dict[str, Any], *, exact: bool = True) -> str:
        """`same`, `tie` where rounding may have said another token, or `different`."""
        pairs = zip(own["tokens"], alone["tokens"], strict=False)
        shared = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        end = len(own["tokens"]) if shared is None else shared
        apart = [abs(a - b) for a, b in zip(own["logprobs"][:end], alone["logprobs"], strict=False)]
        allowed = TOLERANCE if exact else self.served.tolerance
        if max(apart, default=0.0) > allowed:
            return "different"
        what = "exact" if exact else "reused"
        self.apart[what] = max(self.apart[what], *apart, 0.0)
        if shared is None:
            alike = own["reason"] == alone["reason"] and own["text"] == alone["text"]
            return "same" if alike else "different"
        near = dict(alone["near"][shared])
        said = near.get(own["tokens"][shared])
        return "tie" if said is not None and max(near.values()) - said <= allowed else "different"

    def found(self) -> dict[str, Any]:
        """What was counted."""
        apart = {f"{what}, apart by at most": round(most, 6) for what, most in self.apart.items()}
        return {**self.counts, **apart, "which": self.different}

    def complaints(self) -> list[str]:
        """What rounding does not explain."""
        kinds = {name.removesuffix(" asked") for name in self.counts if name.endswith(" asked")}
        found = []
        for kind in sorted(kinds):
            asked, compared, different = (
                self.counts[f"{kind} {what}"] for what in ("asked", "compared", "different")
            )
            allowed = 0 if kind in self.served.exact else max(1, MOST_CHOSEN * compared)
            if different > allowed:
                found.append(f"{kind}: {different} of {compared} answers are not the quiet ones")
            if asked >= ENOUGH and compared < FEWEST * asked:
                found.append(f"{kind}: {compared} of {asked} answers could be compared")
        total = self.counts["same"] + self.counts["tie"] + self.counts["different"]
        if self.counts["tie"] > max(1, MOST_TIES * total):
            found.append(f"{self.counts['tie']} of {total} answers have a tie")
        return found if total else ["nothing was compared"]


def _computed(said: dict[str, Any]) -> list[Any] | None:
    """What an answer by a policy that chooses rows depends on; None where it is not known.

    Documents are the same whether they are frozen, or were and still lie in the store.
    """
    outcome = said["outcome"]
    if outcome is None or said["preempted"] or _missed(said):
        return None
    found = dict(outcome["found"])
    documents = found.pop("request", 0) + found.pop("frozen", 0)
    counts = [outcome[name] for name in ("tokens", "cached", "reused", "recomputed")]
    return [documents, found, outcome["missed"], counts, said["chunks"]]


def _missed(said: dict[str, Any]) -> bool:
    """Whether a policy that reuses documents did not find all of them."""
    outcome = said["outcome"]
    return outcome is not None and not outcome["missed"].keys() <= {
        "fresh",
        "last-token",
        "reuse-off",
    }
