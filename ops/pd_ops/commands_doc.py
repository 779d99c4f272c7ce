"""Writes docs/commands.md from the command line's own definitions, or checks that it is what it would write.

    python -m pd_ops.commands_doc            write it
    python -m pd_ops.commands_doc --check    exit status 1 if it is stale
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer
import typer.core
import typer.main

from pd_ops.cli import build_app

DOCUMENT = Path("docs/commands.md")

HEAD = """# Commands

What `pd-relay COMMAND --help` says, in one page. Results go to standard output, everything else to standard error;
`--json` prints JSON and nothing else there ([keys](json.md)). Exit codes: 0 done, 1 the check failed, 2 wrong usage or
input, 3 the cluster could not do it, 130 interrupted.

This page is written from the commands themselves (`make docs`).
"""


def document() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_section(name, command) for name, command in all_commands().items())])


def all_commands() -> dict[str, Any]:
    """Every command by its full name: "serve", "bench engine"."""
    found: dict[str, Any] = {}
    for name, command in typer.main.get_group(build_app([])).commands.items():
        if isinstance(command, typer.core.TyperGroup):
            found |= {f"{name} {below}": inner for below, inner in command.commands.items()}
        else:
            found[name] = command
    return found


def _section(name: str, command: Any) -> str:
    text = " ".join((command.help or "").split())
    context = command.make_context(name, [], resilient_parsing=True)
    records = [parameter.get_help_record(context) for parameter in command.params if parameter.name != "help"]
    rows = [f"| `{_cell(flag)}` | {_cell(help_text)} |" for flag, help_text in filter(None, records)]
    return "\n".join([f"## `pd-relay {name}`", "", text, "", "| flag | what it does |", "|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(check: bool = typer.Option(False, "--check", help="write nothing; exit 1 if the page is stale")) -> None:
    path = Path(__file__).resolve().parents[2] / DOCUMENT
    if not check:
        path.write_text(document(), encoding="utf-8")
        print(DOCUMENT)
    elif not path.exists() or path.read_text(encoding="utf-8") != document():
        print(f"{DOCUMENT} is stale; write it again with: make docs", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
