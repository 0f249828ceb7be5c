"""kvweave as a plugin of vLLM; `docs/vllm.md` says how it is used and what it composes with.

vLLM finds `plugin.register` through the entry point `vllm.general_plugins`. Nothing here changes
a vLLM that does not ask for it: the backend is chosen with `--attention-backend CUSTOM`.

A folder is a feature: `backend` (attention on vLLM's own KV tensors), `heads` (each class of
heads as a cache layer), `top_k` (decode steps that read few pages), `segments` (documents reused
anywhere), `virtual_pages` (vLLM's block numbers as virtual pages), `server` (marked chats and
knowledge bases over HTTP), `metrics`. Where a feature has a part in vLLM's scheduler and one in its
workers, they are `scheduler` and `worker`, and `connector` is what vLLM is told to load for both.
"""
