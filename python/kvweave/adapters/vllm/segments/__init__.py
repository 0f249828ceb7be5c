"""Segments inside vLLM: documents that were computed before are reused at any position.

A request names its segments (`markers`); `eligibility` says whether they are followed. Beside
vLLM's scheduler it is noted which requests have any (`scheduler`), and the workers are told where
their next tokens go (`message`, by way of `connector`). Each `worker` looks a prompt up in a
`store` of its own and keeps what is new. In a forward (`model`) a `step` carries out what a
recovery policy's walk hands out for each chunk (`chunk`, `chunk_work`), with the rows that are left
(`layer_rows`), what is measured (`probes`, `chunk_kv`) and what is drafted (`draft`).
`prefix_guard` keeps approximate KV out of vLLM's prefix cache. `knowledge_base` is the front of a
knowledge base, `extension` and `document_encoding` its part in the workers.
"""
