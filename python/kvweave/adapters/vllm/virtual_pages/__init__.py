"""vLLM's block numbers as virtual pages (vLLM from 0.33 on).

vLLM's scheduler hands out numbers of pages and keeps its prefix cache by them, as always. Where the
KV of such a page lies is a table of ours: for every class of heads, from page to a block of the
memory that vLLM allocated. So heads may keep what others of the same layer give up.

`layout` says which heads go together, `residency` who holds what; `manager` and `spec` put both
behind vLLM's scheduler. `connector` carries what changed to the workers. There `memory` has the
arena and the tables, `builder` makes each step's tables of them, and the layers that `model` sets
up read and write through `attention` and `backend`.
"""
