"""From the reStructuredText of a documentation to plain paragraphs: sentences stay, code, tables and markup go."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

MIN_PARAGRAPH_CHARS = 60
MIN_LETTER_SHARE = 0.88  # letters and spaces; below it a paragraph is a signature, a list of names or code
MIN_DOCUMENT_CHARS = 1500
SKIPPED_FOLDERS = ("about", "contents", "copyright", "distutils", "includes", "install", "license")

VERSION_NOTES = {
    "versionadded": "New in version", "versionchanged": "Changed in version", "deprecated": "Deprecated since version"
}
ADMONITIONS = {"note", "warning", "seealso", "tip", "important", "hint", "admonition", "topic", "impl-detail"}
# Directives that describe a thing: the line itself is a signature, the text below it is prose.
DESCRIPTIONS = {
    "attribute", "awaitablefunction", "class", "classmethod", "cmdoption", "coroutinefunction", "coroutinemethod",
    "data", "decorator", "decoratormethod", "describe", "envvar", "exception", "function", "glossary", "macro",
    "member", "method", "module", "opcode", "option", "property", "staticmethod", "struct", "type", "var",
}

_DIRECTIVE = re.compile(r"\.\. (?:\w+:)?([\w-]+)::\s*(.*)")
_RULE = re.compile(r"(?P<mark>[=\-~^*#+\"'.:`_])(?P=mark){2,}(\s+(?P=mark)+)*")
_LIST_ITEM = re.compile(r"(?:[*•-]|#\.|\d+\.)\s+(.+)")
_FIELD = re.compile(r":[\w -]+:(\s|$)")
_ASCII = str.maketrans({
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2013": "-", "\u2026": "...",
})
_INLINE = (
    (re.compile(r":(?:[\w+-]+:)?[\w+-]+:`[~!]?([^`<]*?)\s*(?:<[^`>]*>)?`"), r"\1"),  # :role:`text <target>`
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_*"), r"\1"),                                # `text <address>`_
    (re.compile(r"`([^`]+)`_*"), r"\1"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"\1"),
    (re.compile(r"(?<!\w)\*([^*\s][^*]*)\*(?!\w)"), r"\1"),
    (re.compile(r"\|(\w+)\|"), r"\1"),
    (re.compile(r"\s?\((?:Added|Changed|Contributed|Implemented|Patch)\b[^)]* by [^)]*\)+\.?"), ""),
    (re.compile(r"\\"), ""),
)


def documents(sources: Path) -> Iterator[str]:
    """One text a file of the tree `sources` (`*.rst` and `*.rst.txt`, in order of name), one paragraph a line; no
    paragraph appears twice, and short documents are left out."""
    seen: set[str] = set()
    for path in sorted([*sources.rglob("*.rst"), *sources.rglob("*.rst.txt")]):
        if path.relative_to(sources).parts[0].split(".")[0] in SKIPPED_FOLDERS:
            continue
        fresh = [text for text in paragraphs(path.read_text(encoding="utf-8")) if text not in seen]
        seen.update(fresh)
        if sum(map(len, fresh)) >= MIN_DOCUMENT_CHARS:
            yield "\n".join(fresh)


def paragraphs(source: str) -> list[str]:
    """The sentences of one reStructuredText document, a paragraph a string without line breaks, ASCII only."""
    blocks = _blocks(_prose_lines(source.expandtabs().splitlines()))
    texts = (_plain(block) for block in blocks)
    return [text for text in texts if is_prose(text)]


def is_prose(text: str) -> bool:
    """Whether a paragraph reads as sentences."""
    return (
        len(text) >= MIN_PARAGRAPH_CHARS
        and text[-1] in ".:!?)"
        and text.isascii()
        and sum(char.isalpha() or char == " " for char in text) >= MIN_LETTER_SHARE * len(text)
    )


def _prose_lines(lines: list[str]) -> Iterator[str]:
    """Lines of prose; an empty one wherever a paragraph ends. Bodies of dropped directives and literals are skipped."""
    dropped_indent: int | None = None
    for line in lines:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if dropped_indent is not None:
            if not text or indent > dropped_indent:
                continue
            dropped_indent = None
            yield ""
        directive = _DIRECTIVE.match(text)
        if directive:
            replacement = _directive_text(directive[1], directive[2])
            yield ""
            if replacement is None:
                dropped_indent = indent
            elif replacement:
                yield replacement
        elif text == ".." or text.startswith(".. "):
            dropped_indent = indent
        elif text.startswith((">>>", "|", "+-")) or _RULE.fullmatch(text) or _FIELD.match(text):
            yield ""
        elif text.endswith("::"):
            yield text[:-1]
            dropped_indent = indent
        elif item := _LIST_ITEM.match(text):
            yield ""
            yield item[1]
        else:
            yield text


def _directive_text(name: str, argument: str) -> str | None:
    """What a directive's own line says; None if its body goes too."""
    if name in VERSION_NOTES:
        version, _, note = argument.partition(" ")
        return f"{VERSION_NOTES[name]} {version}{': ' + note if note else '.'}"
    if name in ADMONITIONS:
        return f"{name.capitalize()}: {argument}" if argument else ""
    return "" if name in DESCRIPTIONS else None


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    block: list[str] = []
    for line in [*lines, ""]:
        if line:
            block.append(line)
        elif block:
            yield " ".join(block)
            block = []


def _plain(text: str) -> str:
    """Without inline markup, in ASCII where a plain sign exists."""
    for pattern, replacement in _INLINE:
        text = pattern.sub(replacement, text)
    return " ".join(text.translate(_ASCII).split())
