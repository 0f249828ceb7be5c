"""kvweave as a plugin of vLLM; `docs/vllm.md` says how it is used and what it composes with.

vLLM finds `plugin.register` through the entry point `vllm.general_plugins`. Nothing here changes
a vLLM that does not ask for it: the backend is chosen with `--attention-backend CUSTOM`.
"""
