"""Segments inside vLLM: documents that were computed before are reused wherever they stand.

A request names its segments (`markers`). Beside vLLM's scheduler it is noted which requests have
any (`scheduling`), and the workers are told where their next tokens go (`message`, `connector`).
Each worker looks a prompt up in a store of its own (`worker`, `store`), carries out what a recovery
policy's walk hands out for each chunk (`chunk`, `model`, `step`, `probes`, `draft`) and keeps what
is new. `prefix_guard` keeps approximate KV out of vLLM's prefix cache.
"""
