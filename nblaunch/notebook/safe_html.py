"""HTML that ranks display, reduced to what is safe in the panel and in the record.

An allow-list: unknown elements lose their tags, unknown attributes and styles go. The text is built from the parsed
events, so that a parser's mistake cannot let markup through. No scripts, no event handlers, nothing that loads.
"""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser

MAX_BYTES = 512 << 10
"""Longer HTML is not parsed: its text is shown."""
_MAX_DEPTH = 100
_ELEMENTS = frozenset({
    "a", "abbr", "article", "aside", "b", "bdi", "bdo", "blockquote", "br", "caption", "center", "cite", "code",
    "col", "colgroup", "dd", "del", "details", "dfn", "div", "dl", "dt", "em", "figcaption", "figure", "font",
    "footer", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "i", "img", "ins", "kbd", "li", "main", "mark",
    "nav", "ol", "p", "pre", "progress", "q", "rp", "rt", "ruby", "s", "samp", "section", "small", "span",
    "strike", "strong", "sub", "summary", "sup", "table", "tbody", "td", "tfoot", "th", "thead", "time", "tr",
    "tt", "u", "ul", "var", "wbr",
})  # fmt: skip
_VOID = frozenset({"br", "col", "hr", "img", "wbr"})
_DROPPED = frozenset({
    "applet", "audio", "canvas", "datalist", "embed", "frame", "frameset", "head", "iframe", "math", "noembed",
    "noframes", "noscript", "object", "option", "plaintext", "script", "select", "svg", "template", "textarea",
    "title", "video", "xmp",
})  # fmt: skip
"""Elements whose content goes too."""
_ATTRIBUTES = frozenset({
    "align", "alt", "bgcolor", "border", "cellpadding", "cellspacing", "color", "colspan", "dir", "height", "lang",
    "max", "open", "reversed", "rowspan", "scope", "size", "span", "start", "title", "valign", "value", "width",
})  # fmt: skip
_CLASSES = frozenset({"dataframe"})
_COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)", re.DOTALL)
_SELECTORS = re.compile(r"\s*#[\w-]+(?:\s*,\s*#[\w-]+)*\s*")
_STYLES = re.compile(
    r"(?:background|background-color|border(?:-[a-z]+)*|color|display|float|font(?:-[a-z]+)*|letter-spacing|line-height"
    r"|list-style-type|(?:max-|min-)?(?:height|width)|margin(?:-[a-z]+)*|opacity|overflow(?:-[a-z]+)?|padding(?:-[a-z]+)*"
    r"|text-(?:align|decoration|indent|overflow|transform)|vertical-align|white-space|word-break)"
)
_VALUE = re.compile(r"[\w\s#%.,+'\"!()-]{1,300}")
_FUNCTION = re.compile(r"([\w-]*)\(")
_FUNCTIONS = frozenset({"rgb", "rgba", "hsl", "hsla", "linear-gradient"})
_IMAGE = re.compile(r"data:image/(?:png|jpeg|gif|webp|svg\+xml);base64,[A-Za-z0-9+/=\s]+", re.IGNORECASE)
_LINK = re.compile(r"(?:https?://|mailto:|#)[^\s\"'<>\x00-\x1f]*", re.IGNORECASE)


def safe_html(html: str) -> str:
    """Return the safe part of `html`; empty if it shows nothing, such as a script's target."""
    if len(html) > MAX_BYTES:
        return ""
    parser = _Sanitiser()
    parser.feed(html)
    parser.close()
    return parser.result()


class _Sanitiser(HTMLParser):
    """Builds safe HTML from the events of a parse. Every element that it opens it also closes."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._open: list[str] = []
        self._dropping = ""
        self._nested = 0
        self._style: list[str] | None = None
        self._by_id: dict[str, str] = {}
        """The styles of ids: pandas colours cells this way."""
        self._is_visible = False

    def result(self) -> str:
        while self._open:
            self._parts.append(f"</{self._open.pop()}>")
        return "".join(self._parts) if self._is_visible else ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._dropping:
            self._nested += tag == self._dropping
        elif tag in _DROPPED:
            if tag not in ("embed", "frame"):  # they have no content
                self._dropping, self._nested = tag, 1
        elif tag == "style":
            self._style = []
        elif tag in _ELEMENTS and len(self._open) < _MAX_DEPTH:
            self._start(tag, attrs)

    def _start(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given: dict[str, str] = {}
        for name, value in attrs:
            given.setdefault(name, value or "")  # as in a browser
        safe = {name: value for name, value in given.items() if name in _ATTRIBUTES}
        if tag == "img":
            if not _IMAGE.fullmatch(given.get("src", "")):
                return
            safe["src"], self._is_visible = given["src"], True
        if tag == "a" and _LINK.fullmatch(given.get("href", "")):
            safe.update(href=given["href"], rel="noopener noreferrer", target="_blank")
        classes = _CLASSES.intersection(given.get("class", "").split())
        if classes:
            safe["class"] = " ".join(classes)
        style = _safe_style(";".join((self._by_id.get(given.get("id", ""), ""), given.get("style", ""))))
        if style:
            safe["style"] = style
        self._is_visible = self._is_visible or tag == "hr"
        self._parts.append(f"<{tag}{''.join(f' {name}={chr(34)}{escape(safe[name])}{chr(34)}' for name in safe)}>")
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._dropping:
            self._nested -= tag == self._dropping
            if not self._nested:
                self._dropping = ""
        elif tag == "style" and self._style is not None:
            self._read_rules("".join(self._style))
            self._style = None
        elif tag in self._open:
            while True:
                closed = self._open.pop()
                self._parts.append(f"</{closed}>")
                if closed == tag:
                    break

    def handle_data(self, data: str) -> None:
        if self._style is not None:
            self._style.append(data)
        elif not self._dropping:
            self._parts.append(escape(data, quote=False))
            self._is_visible = self._is_visible or bool(data.strip())

    def _read_rules(self, sheet: str) -> None:
        """Take the rules for single elements; the others would style the page."""
        for rule in _COMMENT.sub("", sheet).split("}")[:-1]:
            before, _, style = rule.rpartition("{")
            selectors = before.rpartition("{")[2]  # of a group of rules, such as @media
            if _SELECTORS.fullmatch(selectors):
                for selector in selectors.split(","):
                    name = selector.strip()[1:]
                    self._by_id[name] = f"{self._by_id.get(name, '')};{style}"


def _safe_style(style: str) -> str:
    safe = []
    for name, _, value in (part.partition(":") for part in style.split(";")):
        name, value = name.strip().lower(), value.strip()
        is_known = _STYLES.fullmatch(name) and _VALUE.fullmatch(value)
        functions = {function.lower() for function in _FUNCTION.findall(value)}
        overlaps = name.startswith(("margin", "text-indent", "letter")) and "-" in value  # negative: over other parts
        if is_known and functions <= _FUNCTIONS and not overlaps:
            safe.append(f"{name}:{value}")
    return ";".join(safe)
