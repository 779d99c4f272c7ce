"""YAML that people write: what would be read otherwise than it looks, or not at all, is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_engine.errors import InvalidArgument
from pd_engine.settings import load_settings
from pd_engine.yaml_file import MAX_BYTES, read_yaml_mapping


def bomb(depth: int) -> str:
    """Names ten times as many values with each line."""
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, depth))]
    return "\n".join(lines)


@pytest.mark.parametrize(("text", "message"), [
    ("a: 1\n\tb: 2", "is not YAML"),
    ("engine: {}\nrouter: {}\nengine: {}", "found the key 'engine' twice"),
    ("a: {b: 1, b: 1}", "found the key 'b' twice"),
    ("a: " + "9" * 5000, "is not YAML in UTF-8: Exceeds the limit"),
    ("a: 2026-99-99", "is not YAML in UTF-8: month must be in"),
    ("a: " + "[" * 3000, "nested too deeply"),
    (bomb(30), "more than 100000 values"),
    ("a: &a [*a]", "more than 100000 values"),
    ("a: *nobody", "undefined alias"),
    ("a: !!python/object/apply:os.system [x]", "could not determine a constructor"),
    ("a: 1\n---\na: 2", "expected a single document"),
    ("a: " + "x" * MAX_BYTES, f"larger than {MAX_BYTES} bytes"),
    ("[a]", "must hold a mapping at the top, got list"),
    ("\x00", "special characters are not allowed"),
])
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidArgument, match=message) as error:
        read_yaml_mapping(path, "settings file")
    assert f"settings file {path}" in error.value.message
    with pytest.raises(InvalidArgument):
        load_settings(path)


def test_what_is_taken(tmp_path: Path) -> None:
    """Aliases, and keys that stand over those that were merged in, are what YAML has them for."""
    path = tmp_path / "file.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, x: 4}\n", encoding="utf-8")
    assert read_yaml_mapping(path, "file") == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 4, "y": 2}}
    for empty in ("", "# nothing\n"):
        path.write_text(empty, encoding="utf-8")
        assert read_yaml_mapping(path, "file") == {}
