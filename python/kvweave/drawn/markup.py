"""HTML as strings in which all that is not markup is escaped: names and texts are anybody's."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is HTML already. Only `tag` makes any."""

    __slots__ = ()


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """An element with its attributes, of which `_` reads `-`; content that is no `Markup` is text.

    `name` and the attributes' names are the program's own. Content None is left out.
    """
    named = "".join(
        f' {key.strip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(
        str(part) if isinstance(part, Markup) else escape(str(part))
        for part in content
        if part is not None
    )
    return Markup(f"<{name}{named}>{inner}</{name}>")


def joined(*parts: Markup) -> Markup:
    """Elements one after the other."""
    return Markup("".join(parts))


LINE = "rgba(128,128,128,.35)"
"""The colour of thin lines: seen on white and on black."""

_CELL = f"padding:2px 12px 2px 0;text-align:left;border-bottom:1px solid {LINE};vertical-align:top"


def frame(*parts: Markup) -> Markup:
    """What a notebook shows: in its own colours, so that it can be read in light and dark."""
    style = "font:13px/1.5 system-ui,sans-serif;color:inherit;max-width:960px;overflow-x:auto"
    return tag("div", *parts, style=style)


def headline(text: str) -> Markup:
    """A line in bold."""
    return tag("div", text, style="font-weight:600;margin:2px 0 6px")


def table(columns: list[str], rows: list[list[object]]) -> Markup:
    """A plain table, its cells text or markup."""
    heads = [tag("th", name, style=f"{_CELL};opacity:.7;font-weight:400") for name in columns]
    lines = [tag("tr", *(tag("td", cell, style=_CELL) for cell in row)) for row in rows]
    body = joined(tag("thead", tag("tr", *heads)), tag("tbody", *lines))
    return tag("table", body, style="border-collapse:collapse;margin:6px 0;color:inherit")


def swatch(colour: str, words: str) -> Markup:
    """A square of a colour, and what it stands for."""
    box = f"display:inline-block;width:10px;height:10px;margin-right:5px;background:{colour}"
    return tag("span", tag("span", style=box), words, style="margin-right:16px;white-space:nowrap")


def legend(*entries: Markup) -> Markup:
    """Swatches in a line."""
    return tag("div", *entries, style="margin:5px 0")
