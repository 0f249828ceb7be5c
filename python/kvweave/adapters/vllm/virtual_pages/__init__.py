"""vLLM's block numbers as virtual pages (vLLM from 0.33 on).

vLLM's scheduler hands out numbers of pages and keeps its prefix cache by them, as always. Where the
KV of such a page lies is a table of ours: for every class of heads, from page to a block of the
memory that vLLM allocated. So heads may keep what others of the same layer give up.

`layout` says which heads go together, `residency` which request holds which pages; `manager` and
`spec` put both behind vLLM's scheduler. `scheduler` sends what changed to the workers (`message`,
by way of `connector`), where `worker` brings the tables of `page_memory` up to date. `builder`
makes each step's tables of them, and the layers that `model` sets up read and write their KV with
`attention` and `backend`.

Where heads choose pages, `choosing_builder` and `choosing_attention` stand in their place. Pages of
such heads may be far, in the host's memory: `far_requests` is the scheduler's part of that,
`far_memory` a worker's, and `far_choice` what a step's layers do with it.
"""
