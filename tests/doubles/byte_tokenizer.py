"""A tokenizer of bytes, for models of few tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Bytes:
    """A tokenizer of bytes, with or without an id before every text."""

    eos_token_id = None

    def __init__(self, lead: int | None = None) -> None:
        self.lead = [] if lead is None else [lead]

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        ids = list(text.encode())
        return SimpleNamespace(input_ids=self.lead + ids if add_special_tokens else ids)

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")
