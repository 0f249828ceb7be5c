"""Handing a request over: its KV leaves one cache as a payload and goes on in another.

Prefill and decode may run on different machines. What travels between them is what the tokens to
come can see of each head: full heads whole, window heads their sink and window (RedKnot, §4.3).

    payload = export_kv(cache, pages, request, rope=rope)
    sent = payload.to_bytes()
    …
    request = import_kv(cache, pages, KvPayload.from_bytes(sent))
"""

from kvweave.payload.header import GroupSpans, PayloadHeader
from kvweave.payload.packed import PackedHeader, PackedTokens
from kvweave.payload.page_format import PageFormat
from kvweave.payload.payload import KvPayload, PayloadSizes
from kvweave.payload.transfer import export_kv, freeze_kv, import_kv

__all__ = [
    "GroupSpans",
    "KvPayload",
    "PackedHeader",
    "PackedTokens",
    "PageFormat",
    "PayloadHeader",
    "PayloadSizes",
    "export_kv",
    "freeze_kv",
    "import_kv",
]
