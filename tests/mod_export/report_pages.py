"""A page as a parser sees it, for tests of its contents."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "input"}
DRAWN = {"line", "rect", "circle"}


class Page(HTMLParser):
    """Collects every element with its attributes and ancestors; tags must match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(str(text))  # `Markup` would come out escaped.
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self._open)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self._open)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self._open):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]


def drawn(html: str, kind: str) -> list[dict[str, float]]:
    """Numbers of every mark of a class, such as x1, cx and width; percentages lose their sign."""
    found = [attributes for tag, attributes, _ in Page(html).elements if tag in DRAWN and attributes["class"] == kind]
    return [
        {
            name: float(str(value).removesuffix("%"))
            for name, value in mark.items()
            if name != "class" and value != "100%"
        }
        for mark in found
    ]


def paths(html: str, kind: str) -> list[str]:
    """Path data of a class."""
    return [str(attributes["d"]) for attributes in Page(html).all("path") if attributes["class"] == kind]


def told(html: str) -> list[str]:
    """Labels that describe the drawings in words."""
    return [str(attributes["aria-label"]) for attributes in Page(html).all("svg") if "aria-label" in attributes]
