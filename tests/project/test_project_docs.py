"""What the documentation says can be typed, exists; what it links to, is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from pd_ops import commands_doc
from support.checkout import ROOT, tracked_files

COMMANDS = commands_doc.all_commands()
GROUPS = {name.partition(" ")[0] for name in COMMANDS if " " in name}
FLAGS = {
    name: {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    for name, command in COMMANDS.items()
}
DOCUMENTS = sorted(path for path in tracked_files() if path.suffix == ".md")


def typed_commands(text: str) -> list[list[str]]:
    """Words of each `pd-relay ...` in code spans and code blocks, up to the end of the command."""
    code = re.findall(r"```.*?\n(.*?)```|`([^`\n]+)`", text, flags=re.DOTALL)
    lines = "\n".join(block or span for block, span in code).replace("\\\n", " ").splitlines()
    found = [re.search(r"\bpd-relay ([^#|;&]*)", line) for line in lines]
    return [match[1].split() for match in found if match]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_command_that_is_shown_exists_with_its_flags(document: Path) -> None:
    for words in typed_commands((ROOT / document).read_text(encoding="utf-8")):
        if not words or words[0].startswith("-") or not re.fullmatch(r"[a-z-]+", words[0]):
            continue
        name = " ".join(words[:2]) if words[0] in GROUPS else words[0]
        if name in GROUPS:
            continue
        assert name in COMMANDS, f"{document}: pd-relay {' '.join(words)}"
        flags = [word.split("=")[0] for word in words[1:] if word.startswith("--")]
        assert set(flags) <= FLAGS[name], f"{document}: pd-relay {' '.join(words)}"


def test_commands_are_found_in_text() -> None:
    text = "`pd-relay serve --decode 2`:\n```\npd-relay submit \\\n  --prompt x  # a comment\n```\nnot pd-relay this"
    assert sorted(typed_commands(text)) == [["serve", "--decode", "2"], ["submit", "--prompt", "x"]]


def test_the_reference_of_commands_is_fresh_and_complete() -> None:
    reference = (ROOT / commands_doc.DOCUMENT).read_text(encoding="utf-8")
    assert reference == commands_doc.document()
    for name, command in COMMANDS.items():
        assert f"## `pd-relay {name}`" in reference
        assert command.help
        assert not [flag for flag in FLAGS[name] - {"--help"} if flag not in reference]
        assert not [parameter.opts for parameter in command.params if not parameter.help]


def test_every_make_target_that_is_shown_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        shown = re.findall(r"(?:`|^|&& )make ([a-z-]+)", text, flags=re.MULTILINE)
        assert set(shown) <= targets, document


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_link_leads_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name if name else ROOT / document
        assert path.exists(), f"{document}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{document}: {target}"


def anchors(path: Path) -> set[str]:
    """What a heading is called in a link, as GitHub does it."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_readme_lists_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f"| `pd-relay {name.split()[0]}` |" not in text]


def test_the_readme_begins_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"make ([a-z]+)", text)[:2] == ["demo", "test"]


def test_the_pinned_hooks_are_the_checks_of_make() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    recipe = subprocess.run(
        ["make", "--dry-run", "--always-make", "check"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for tool in ("ruff check", "mypy", "lint-imports", "pd_ops.protos", "pd_ops.settings_doc", "pd_ops.commands_doc"):
        assert tool in hooks
        assert tool in recipe


def test_every_decision_is_listed_and_has_its_parts() -> None:
    folder = ROOT / "ops" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    pages = sorted(path for path in folder.glob("*.md") if path.name != "README.md")
    numbers = [path.name[:4] for path in pages]
    assert len(numbers) == len(set(numbers))
    for path in pages:
        assert f"[{path.name[:4]}]({path.name})" in index, f"{path.name} is not in the list"
        text = path.read_text(encoding="utf-8").lower()
        assert text.startswith(f"# {path.name[:4]}")
        assert "change our mind" in text, path.name
