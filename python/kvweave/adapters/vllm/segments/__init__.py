"""Segments inside vLLM: documents that were computed before are reused wherever they stand.

A request names its segments (`markers`), the scheduler's half of the connector tells the workers
where it lies (`message`, `connector`), and each worker looks the prompt up in a store of its own
(`store`), carries out what a recovery policy's walk hands out (`chunk`, `step`, `probes`, `draft`)
and keeps what is new.
`prefix_guard` keeps approximate KV out of vLLM's prefix cache.
"""
