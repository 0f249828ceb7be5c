"""A store on disk that belongs to one model: another one's engine does not start on it."""

from __future__ import annotations

import logging
from os import PathLike
from typing import Any

from kvweave.errors import ForeignStore
from kvweave.store import Store

_log = logging.getLogger(__name__)


def opened_for(
    model: str | None, option: str, folder: str | PathLike[str], **settings: Any
) -> Store:
    """The store in a folder of a model (`model_identity`), or of any where it is None.

    `option` of the plugin has several models share a folder; `settings` are those of `Store`.

    Errors: `ForeignStore` for a folder of another model, and as `Store`.
    """
    try:
        store = Store(folder, model=model, **settings)
    except ForeignStore as error:
        text = f"{error}; name another folder, or set {option} to have several models use this one"
        raise ForeignStore(text, expected=error.expected, got=error.got) from error
    if model is not None and store.model is None:
        text = "kvweave store: several models have written into %s; it goes on to belong to none"
        _log.warning(text, folder)
    return store
