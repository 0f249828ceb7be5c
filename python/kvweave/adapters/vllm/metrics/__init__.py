"""Metrics of kvweave on vLLM's own `/metrics`.

`segments` shows what workers report of reused segments. `scheduler` counts what vLLM's scheduler
knows of its pool of blocks, and `pool` shows it. `named` gives both their names and labels.
"""
