"""HTML that is safe by construction: text is escaped where it becomes a part of an element."""

import html

from pytree_ckpt.pictures.text import plain


class Html(str):
    """Text that is HTML already. Only the functions of this module make it."""

    __slots__ = ()


Content = Html | str


def tag(name: str, /, *content: Content, **attributes: str) -> Html:
    """An element; `class_` is the attribute `class`, as Python has that word.

    Example:
        >>> tag("b", "<script>", class_="x")
        '<b class="x">&lt;script&gt;</b>'
    """
    pairs = (
        f' {key.rstrip("_").replace("_", "-")}="{_escape(value)}"'
        for key, value in attributes.items()
    )
    head = f"<{name}{''.join(pairs)}>"
    return Html(head if name == "meta" else f"{head}{join(*content)}</{name}>")


def join(*content: Content) -> Html:
    """Elements and texts one after the other."""
    return Html("".join(c if isinstance(c, Html) else _escape(c) for c in content))


def _escape(text: str) -> str:
    return html.escape(plain(text))


def document(*content: Content, title: str, style: str) -> str:
    """A page that needs nothing but itself, and allows nothing else."""
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'",
        ),
        tag("title", title),
        Html(f"<style>{style}</style>"),
    )
    return "<!doctype html>\n" + tag("html", tag("head", *head), tag("body", *content), lang="en")
