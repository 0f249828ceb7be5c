"""`LogWatch`: errors that somebody logged, while nobody raised them."""

from __future__ import annotations

import logging
from collections.abc import Sequence


class LogWatch(logging.Handler):
    """Errors, and whatever has a traceback, in the logs of these names and of everybody else.

    Made once these are imported: vLLM takes away handlers that were there before.
    """

    def __init__(self, names: Sequence[str] = ("vllm", "kvweave")) -> None:
        super().__init__(logging.DEBUG)
        self.errors: list[str] = []
        self._names = (*names, "")
        for name in self._names:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps what is an error."""
        text = record.getMessage()
        if record.levelno >= logging.ERROR or record.exc_info or "Traceback" in text:
            self.errors.append(f"{record.name}: {text}")

    def close(self) -> None:
        """Hears no more."""
        for name in self._names:
            logging.getLogger(name).removeHandler(self)
        super().close()
