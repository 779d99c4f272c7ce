"""The project speaks of itself only, in the same words everywhere. Patterns are put together here, so that this file
does not contain what it forbids."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.checkout import GENERATED_SUFFIXES, ROOT, tracked_files

BINARY_SUFFIXES = {".safetensors", ".xz", ".png", ".gz", ".bin"}
LONGEST_FILE_LINES = 400

PLACES = {
    "a path of somebody's machine": "/(?:wor" + "k|hom" + "e/[a-z]+|roo" + "t|Use" + "rs|mn" + "t|far" + "m)/",
    "a package registry's host": r"(?:py" + r"pi\.org|python" + r"hosted|npm" + r"js\.(?:org|com)|deb" + r"ian\.org"
    + r"|download\.py" + r"torch|proxy\.gol" + r"ang)",
    "somebody's place of work": r"\b(?:COM" + r"PASS\b|DEV" + r"ELOPERS\.md|before-" + r"stop|sub" + r"agents?\b"
    + r"|\.lib" + r"rary/)",
}
# One word for one thing (CONTRIBUTING.md): a right to blocks is a lease, a meeting point is an address and a token.
OTHER_WORDS = "(?i)bootstrap[_ ]?" + "room|" + "tick" + "et"


def texts() -> list[tuple[Path, str]]:
    """Tracked files that are text; the tokenizer's vocabulary is data."""
    files = [path for path in tracked_files() if path.suffix not in BINARY_SUFFIXES and path.name != "tokenizer.json"]
    return [(path, (ROOT / path).read_text(encoding="utf-8")) for path in files]


def matches(pattern: str, files: list[tuple[Path, str]]) -> list[str]:
    """path:line of every match."""
    return [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in files
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]


@pytest.mark.parametrize("what", PLACES)
def test_no_file_names_a_place(what: str) -> None:
    assert not matches(PLACES[what], texts())


def test_the_guard_sees_what_it_forbids() -> None:
    samples = ["cd /wor" + "k/tree", "https://py" + "pi.org/simple", "see COM" + "PASS"]
    for pattern, sample in zip(PLACES.values(), samples, strict=True):
        assert matches(pattern, [(Path("sample"), sample)])


def test_one_word_for_one_thing() -> None:
    code = [(path, text) for path, text in texts() if path.suffix in {".py", ".proto", ".cpp", ".h"}]
    assert not matches(OTHER_WORDS, code)


def test_no_drawer_for_everything() -> None:
    drawers = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    assert not [path for path in tracked_files() if path.name in drawers]


def test_a_file_is_read_in_one_sitting() -> None:
    code = [(p, t) for p, t in texts() if p.suffix in {".py", ".cpp", ".h"} and not p.name.endswith(GENERATED_SUFFIXES)]
    assert not [f"{path}: {len(text.splitlines())} lines" for path, text in code
                if len(text.splitlines()) > LONGEST_FILE_LINES]


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in tracked_files() if path.parts[0] == "tests" and path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
    assert not [path for path in tracked_files() if path.parts[0] == "tests" and path.name == "__init__.py"]
