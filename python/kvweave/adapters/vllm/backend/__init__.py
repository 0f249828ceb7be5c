"""Ragged paged attention on the KV tensors that vLLM allocates.

`paged_backend` is what vLLM asks first. `builder` makes the tables of a step (`step_tables`,
`metadata`) of vLLM's batch, and `attention` writes and reads pages with them, or hands plain
prefills on to `dense_prefill`. `decoder_layers` replaces the attention of a model's layers.
"""
