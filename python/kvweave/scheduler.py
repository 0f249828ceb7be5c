"""The scheduler: which requests of a cache the next step computes. Pure: time is an argument.

    scheduler = Scheduler(cache, token_budget=8192)
    scheduler.arrive(7, len(tokens), now=time.monotonic_ns(), cached=0)
    plan = scheduler.plan(now, answered=said_a_token, finished=ended)

Requests have numbers that the caller chooses, tokens are counted and never seen. A plan is made
once a step and carried out in this order; one call a step crosses the border:

    for request, why in plan.refused: …     # ended: it can never fit; its KvRequest is released
    for request, _ in plan.preempted: …     # its KvRequest is released; what it said is kept
    for request, known, cached in plan.admitted: …   # cache.admit(prompt and what it has said)
    for request, first, count, last in plan.prefill: …   # rows [first, first + count) are computed
    plan.decode                             # each appends its last token and says another

`plan.blocked` is the first who found no room, the pages needed and those that could be had.

Who decodes, and whose chunk is the last, says a token; these are the `answered` of the next plan,
all or some: who has not answered is left alone, so that a plan may be made while the one before is
being computed. `finished` are those who have said all. Both are int64 [N] or lists of ints;
`produced(request, n)` is for n tokens at once. `cancel` is for any time and state, and the answer
of a cancelled request is nobody's: numbers that are not live are passed over. `state` is "waiting",
"prefilling", "decoding" or, when it has ended, None. `metrics` has queue depths, waits and counts.

Memory. A plan promises room by counting, from what the cache says is available at that moment: a
request pays for all its tokens when it is admitted, then for each page that it grows into. Of
these, `shared_pages` (of the arena) are left out, which others hold already and it will read;
`pages_of` counts what some tokens take. Who comes with `reserve` takes room for so many tokens
more when it is admitted, and needs none while it says them (`expect` names all of them together:
`reserved`). Nobody is admitted whose blocks the cache could not give of every head group: free
pages may lie in slabs of another. `homes` are host memory where blocks of head groups may lie
beside the device: of each its number, the cache that counts its blocks there, its slots, and the
blocks that it has on the device beside these at most. Who `leaves` and does not fit as a whole is
admitted by that working set, and has its other blocks promised there; `in_parts` says so, and
`holds` tells what of it has been taken, until which the rest is nobody else's. When the cache
raises `PoolFull` all the same (other users of it took the room, or who gave way had pages that
others read too),
`not_done(request, no_room=True)` says so: a prompt waits again and must hold nothing, until
somebody who runs gives room back or is done with a prompt, or nobody runs; for a request that
decodes, the next plan makes room. A step that failed for another reason is `not_done(request)`, and
is planned again.

Rules. `priority` (more is sooner) makes a request as old as if it had come `ageing_ns` earlier for
each level, so nobody is passed for longer than its difference in levels times that. Decoding goes
first; the first prompt in order gets `lead_share` of the rest, others share what remains; at most
`partial_prefills` prompts are in mid-way, of which one place is kept for those of no more than
`chunk_tokens`. Only a failed allocation preempts: for a running request the last by age gives way,
for a waiting one those of lower priority and the same kind. Who finds no room lets others pass for
`patience_ns`, then nobody is admitted before it. Namespaces share tokens by weight, in rounds of
`quantum`. Requests of different `kind` (a RoPE regime, a shape of step) never share a step, take
turns, and never evict one another for it. `whole` is for prompts whose policy cannot be cut.
`order="short-first"` is PREFLOW's: 2^(age / doubling_ns) / (total work × work left). A chunk may be
computed in spans of at most `span_tokens`, between which windows move on.
"""

from kvweave._native import Scheduler, StepPlan

__all__ = ["Scheduler", "StepPlan"]
