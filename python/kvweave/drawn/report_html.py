"""A report and an answer in a notebook: the plan's picture, and what the request cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvweave.drawn.markup import Markup, frame, headline, joined, table, tag
from kvweave.drawn.plan_html import plan_parts
from kvweave.drawn.spans import read_rows

if TYPE_CHECKING:
    from kvweave.cache import ReusePlan

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_STEPS = {
    "load_s": "documents loaded",
    "lookup_s": "look-up",
    "copy_s": "copies",
    "prefill_s": "prefill",
    "decode_s": "decoding",
}


def report_html(report: Mapping[str, Any], plan: ReusePlan) -> str:
    """A report (`Report.to_dict()`) as a piece of HTML that needs nothing else; no script."""
    return frame(headline(_headline(report)), _report(report, plan))


def answer_html(answer: Mapping[str, Any], plan: ReusePlan) -> str:
    """An answer (`Generation.to_dict()`): its text, and its report folded below."""
    text = str(answer["text"])
    style = "white-space:pre-wrap;margin:2px 0 8px;max-height:24em;overflow-y:auto"
    said = tag("div", text or f"{len(answer['tokens'])} tokens, without a tokenizer", style=style)
    report = answer["report"]
    words = tag("summary", _headline(report), style="cursor:pointer;opacity:.8")
    return frame(said, tag("details", words, _report(report, plan)))


def _headline(report: Mapping[str, Any]) -> str:
    return (
        f"{report['policy']}: {report['ttft_s']:.3g} s to the first token, "
        f"{report['row_share']:.0%} of the rows computed"
    )


def _report(report: Mapping[str, Any], plan: ReusePlan) -> Markup:
    parts = [plan_parts(plan)]
    if report["rows_per_layer"] and len(report["passes"]) <= 1:
        parts.append(_layers(report["rows_per_layer"], report["tokens"]))
    elif report["passes"]:
        parts.append(_passes(report["passes"]))
    if report["documents"]:
        parts.append(_documents(report["documents"]))
    return joined(*parts, _costs(report))


def _layers(rows_per_layer: list[int], tokens: int) -> Markup:
    rows: list[list[object]] = []
    for first, end, count in read_rows(rows_per_layer, tokens):
        layers = f"{first}" if end == first + 1 else f"{first}–{end - 1}"
        rows.append([layers, f"{count:,} of {tokens:,}", _share(count / tokens)])
    return table(["layers", "rows computed", ""], rows)


def _documents(documents: list[Mapping[str, Any]]) -> Markup:
    rows: list[list[object]] = [
        [f"[{one['start']:,}, {one['end']:,})", one["source"], one["why"]] for one in documents
    ]
    return table(["document", "reused from", "because"], rows)


def _passes(passes: list[Mapping[str, Any]]) -> Markup:
    rows: list[list[object]] = []
    for number, one in enumerate(passes, 1):
        count = sum(one["rows_per_layer"])
        what = f"{one['tokens']} drafted tokens" if one["kind"] == "draft" else f"{count:,}"
        rows.append([number, one["kind"], what, f"{one['seconds'] * 1e3:,.1f} ms"])
    return table(["pass", "kind", "rows of all layers", "time"], rows)


def _costs(report: Mapping[str, Any]) -> Markup:
    times = report["timings"]
    costs = [(words, f"{times[name] * 1e3:,.1f} ms") for name, words in _STEPS.items()]
    costs += [
        ("KV of its own", _bytes(report["kv_bytes"])),
        ("KV read with others", _bytes(report["shared_kv_bytes"])),
        ("mode", report["mode"]),
    ]
    if report["flops"]:
        costs.append(("matrix products", f"{sum(report['flops'].values()):.3g} FLOPs"))
    if report["mode_reason"]:
        costs.append(("because", report["mode_reason"]))
    style = "display:flex;flex-wrap:wrap;gap:4px 22px;margin:8px 0"
    return tag("div", *(_cost(*cost) for cost in costs), style=style)


def _cost(what: str, value: str) -> Markup:
    name = tag("span", what, style="display:block;font-size:11px;opacity:.7")
    return tag("span", name, value)


def _share(share: float) -> Markup:
    """A thin bar of a share."""
    line = f"display:block;height:8px;background:currentColor;opacity:.55;width:{share:.1%}"
    return tag("span", tag("span", style=line), style="display:block;width:160px;padding-top:6px")


def _bytes(count: int) -> str:
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
