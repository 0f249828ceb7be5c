"""kvweave's store as a tier of vLLM's own KV offloading (vLLM 0.33).

vLLM moves blocks between its GPU and the host's memory; this tier keeps them on disk behind that,
in a `kvweave.Store`: checksums on all that is served, budgets, and what was acknowledged survives.
"""
