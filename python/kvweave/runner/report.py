"""What a request cost and why: attached to every result."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvweave.drawn import answer_html, report_html

if TYPE_CHECKING:
    from kvweave.cache import ReusePlan


@dataclass
class Timings:
    """Wall-clock seconds of each part of a request.

    `load_s` documents that came from the host's memory or a store, the wait for them included;
    `lookup_s` plan and admission; `copy_s` Δ-RoPE copies; `prefill_s` the layers and the last
    token's logits; `select_s` the policy's scores and choices (inside `prefill_s`); `decode_s`
    all decode steps of the request's batch while it was running.
    """

    load_s: float = 0.0
    lookup_s: float = 0.0
    copy_s: float = 0.0
    prefill_s: float = 0.0
    select_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class PassReport:
    """One way through the layers, or one draft between two.

    `kind`: "layers" or "draft". `rows_per_layer` [L]: rows computed. `flops`: matrix products by
    part. `tokens`: of a draft, how many were decoded; 0 when the cache had no room for them.
    """

    kind: str
    rows_per_layer: list[int]
    flops: dict[str, int]
    seconds: float
    tokens: int = 0


@dataclass(frozen=True)
class DocumentSource:
    """Where the KV of a marked document at tokens [start, end) came from, and why from there.

    `source`: "device", "host" (its memory), "disk" (a store), "remote" (one on another machine), or
    "computed" with the prompt.
    """

    start: int
    end: int
    namespace: str
    source: str
    why: str


@dataclass(frozen=True)
class CanaryCheck:
    """What it took to compare a request with full, and what came out.

    `kl`: nats a token, the mean over `tokens` of the answer; None where there was no room to
    compare. `flops` (of full's prefill) and `seconds` came on top of the request's own.
    """

    kl: float | None
    tokens: int
    flops: int
    seconds: float


@dataclass
class HealingReport:
    """What watching an answer and healing it came to, for one request.

    `watched`: times that a ring of queries was scored; `held` and `risen`: of all attention on
    reused tokens what the candidates held each time, and how much more than before, see `Healing`.
    `healed`: times that tokens were recomputed, `recomputed` of them in all. `refused`:
    times that nothing was, by reason: "no room", "windows" (what the rows see is no longer kept) or
    "frequencies" (those of RoPE change with the length). `watch_flops`, `watch_s`: of the scoring;
    `heal_flops`, `heal_s`: of the recomputation.
    """

    watched: int = 0
    healed: int = 0
    recomputed: int = 0
    held: list[float] = field(default_factory=list)
    risen: list[float] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    watch_flops: int = 0
    heal_flops: int = 0
    watch_s: float = 0.0
    heal_s: float = 0.0

    def refuse(self, reason: str) -> None:
        """Takes note of a time that nothing could be healed."""
        self.refused[reason] = self.refused.get(reason, 0) + 1


@dataclass
class PackingReport:
    """What packing a document or a segment has come to; told anew when it is packed finally.

    Segments are of the text of requests.

    `basis`: "shared" with other text, or "own", of `basis_bytes`. `lost_first`: of keys and of
    values the share of Σ |x|² that was lost when pages were packed at once; `lost`: that in their
    own basis. `chosen`: of each layer, KV head and side the basis that it is packed in, counted by
    name. Of one that a strategy has packed, `formats`: how many layers' KV heads have each, of
    `bytes` with their bases; `most_lost`: the most that any of them loses of its own keys or
    values; `over_bound`: how many have the fallback and lose more than the bound in that as well.
    `waiting`: whether it is still to be packed finally; `why` it was not.
    """

    tokens: int
    format: str
    basis: str = "shared"
    basis_bytes: int = 0
    lost_first: tuple[float, float] | None = None
    lost: tuple[float, float] | None = None
    chosen: dict[str, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    most_lost: float | None = None
    over_bound: int = 0
    waiting: bool = False
    why: str = ""


@dataclass
class PackedReport:
    """How the full pages of a prompt were packed: so many of them.

    `beside`: layer by layer, each while the layers behind it were computed. `behind`: all layers at
    once, when their rows were done. `why`: what went wrong at the latest layer that was to be
    packed beside others and was not; its pages were packed behind their rows then. `exact_first`:
    so many tokens at the beginning of a document stay exact beside its pages. `segments`: those of
    the request's text that are packed finally, or were to be, in order; some come while it decodes.
    """

    beside: int = 0
    behind: int = 0
    why: str = ""
    exact_first: int = 0
    segments: list[PackingReport] = field(default_factory=list)

    def note(self, pages: int, beside: bool, why: str) -> None:
        """Takes note of some pages."""
        if beside:
            self.beside += pages
        else:
            self.behind += pages
        self.why = why or self.why


@dataclass
class SpeculationReport:
    """What came of drafting, for one answer.

    `drafted`: tokens that `rounds` drafted, `accepted`: those of them that were said. A round says
    one token more than it accepts, but where a draft ended the answer.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def note(self, drafted: int, accepted: int) -> None:
        """Takes note of a round; one without drafts is a step."""
        if drafted:
            self.rounds += 1
            self.drafted += drafted
            self.accepted += accepted


@dataclass
class Report:
    """What was reused, what was computed, how long it took, what it holds.

    `rows_per_layer` [L]: rows computed in each layer, by all passes. `passes`: the same one by one,
    in order; most policies have one. `kv_bytes`: bytes of the blocks that only
    this request holds once it is prefilled; `shared_kv_bytes`: bytes of blocks it reads together
    with others. `mode`: "materialise" or "share", and `mode_reason` when it differs from the
    runner's. `device_bytes`: the most that weights, pages and this prefill take where the model
    lies. `flops`: matrix products of the prefill as they were run, by part. `restored`: (layer,
    KV head) pairs of local heads that were made full; `refused`: those for which the cache had no
    room, or no longer all of their window. `settled_now`: reused tokens that the policy computed
    again; `settled_before`: tokens that earlier turns of a conversation left, which counts them as
    neither reused nor recomputed. `healing`: of an answer that was watched.
    `canary`: of a request that was drawn for comparison. `speculation`: of an answer that a runner
    with `speculate` has decoded. `documents`: where the KV of its marked documents came from, of a
    runner with tiers and a policy that reuses them. `packing`: of a document that was encoded into
    pages that are packed in a basis. `packed`: of a prompt without documents over packed pages.
    `resumed`: how often the request gave its blocks to others after its first token, and was
    prefilled again by what there was then; all else is of its first prefill.
    """

    policy: str
    plan: ReusePlan
    tokens: int
    reused_prefix: int
    reused_segment: int
    recomputed: int
    mode: str
    mode_reason: str = ""
    rows_per_layer: list[int] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    kv_bytes: int = 0
    shared_kv_bytes: int = 0
    device_bytes: int = 0
    flops: dict[str, int] = field(default_factory=dict)
    restored: list[tuple[int, int]] = field(default_factory=list)
    refused: list[tuple[int, int]] = field(default_factory=list)
    settled_now: int = 0
    settled_before: int = 0
    healing: HealingReport | None = None
    canary: CanaryCheck | None = None
    speculation: SpeculationReport | None = None
    documents: list[DocumentSource] = field(default_factory=list)
    packing: PackingReport | None = None
    packed: PackedReport | None = None
    resumed: int = 0

    def __repr__(self) -> str:
        """One line; `to_dict` tells all."""
        return (
            f"Report({self.policy}: {self.tokens} tokens, {self.reused_prefix} by prefix, "
            f"{self.reused_segment} by segment, {self.recomputed} recomputed; {self._sources}"
            f"{self.row_share:.0%} of rows, {self.ttft_s:.3g} s to the first token)"
        )

    def _repr_html_(self) -> str:
        return report_html(self.to_dict(), self.plan)

    @property
    def _sources(self) -> str:
        """How many documents came from where."""
        if not self.documents:
            return ""
        counts = Counter(document.source for document in self.documents)
        told = ", ".join(f"{source} {count}" for source, count in counts.items())
        return f"documents reused from: {told}; "

    @property
    def ttft_s(self) -> float:
        """Time to the first token's logits: loads, look-up, copies and prefill."""
        times = self.timings
        return times.load_s + times.lookup_s + times.copy_s + times.prefill_s

    @property
    def row_share(self) -> float:
        """Mean share of the prompt's tokens that a layer computed."""
        if not self.rows_per_layer:
            return 0.0
        return sum(self.rows_per_layer) / (len(self.rows_per_layer) * self.tokens)

    @property
    def missed(self) -> dict[str, int]:
        """Tokens whose KV was not reused, by the plan's reason (`MissReason`); most first."""
        counts: Counter[str] = Counter()
        for span in self.plan.spans:
            if span.reason is not None:
                counts[span.reason] += span.end - span.start
        return dict(counts.most_common())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, the plan included."""
        parts = ("healing", "canary", "packing", "packed", "speculation")
        nested = ("plan", "timings", "passes", "documents", *parts)
        plain = {k: v for k, v in self.__dict__.items() if k not in nested}
        return {
            **plain,
            "plan": self.plan.to_dict(),
            "passes": [asdict(one) for one in self.passes],
            "timings": asdict(self.timings),
            "documents": [asdict(one) for one in self.documents],
            **{name: one and asdict(one) for name in parts for one in (getattr(self, name),)},
            "missed": self.missed,
            "ttft_s": self.ttft_s,
            "row_share": self.row_share,
        }


@dataclass
class Generation:
    """A finished answer: text (empty without a tokenizer), token ids, and the report.

    `stopped`: its last token ended it, by its id or with a string, before all that were allowed.
    """

    text: str
    tokens: list[int]
    report: Report
    stopped: bool = False

    def _repr_html_(self) -> str:
        return answer_html(self.to_dict(), self.report.plan)

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain data, its report included."""
        return {**self.__dict__, "report": self.report.to_dict()}


@dataclass(frozen=True)
class StreamedToken:
    """One token of a stream; `text` is what it adds to the text so far (it may be empty)."""

    token: int
    text: str
