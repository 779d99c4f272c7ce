"""A command that goes on in the background, when the shell that it was typed in is gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pd_engine.errors import InvalidArgument

FLAG = "--detach"


def start_detached(arguments: Sequence[str], path: Path) -> int:
    """Runs the same command line without the flag, in a session of its own. Its process id.

    Args:
        path: gets its documents, one line each; what it notes goes to a file of that name with ".log".

    Raises:
        InvalidArgument: the files cannot be written.
    """
    try:
        with path.open("wb") as documents, path.with_name(f"{path.name}.log").open("wb") as notes:
            process = subprocess.Popen(
                [sys.executable, "-m", "pd_ops.cli", *without_flag(arguments), "--json"],
                stdin=subprocess.DEVNULL, stdout=documents, stderr=notes, start_new_session=True,
            )
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}") from None
    return process.pid


def without_flag(arguments: Sequence[str]) -> list[str]:
    """Without `--detach FILE`, `--detach=FILE` and `--json`, which is added again."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument == FLAG:
            skip = not skip
        elif not argument.startswith(f"{FLAG}=") and argument != "--json":
            kept.append(argument)
    return kept
