"""Where a command's results go. Standard output belongs to them alone; everything else is sent to standard error.

`claim_stdout` takes file descriptor 1 away from the process, so that neither a library, nor Ray, nor a child process
can write between the lines of a result.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

from pd_engine.errors import PdRelayError

Document = dict[str, Any]


class ReaderGone(Exception):
    """Nobody reads standard output any more, as after `| head`. (Not an OSError: Typer has ideas about those.)"""


class Interrupted(Exception):
    """Ctrl-C, of a command that has already printed what had come until then. (Of a KeyboardInterrupt Typer makes an
    exit code.)"""


class Output:
    """A command's two channels.

    With `as_json`, `document` writes one line of JSON each and `text` nothing; without, the other way round.
    """

    def __init__(self, stdout: TextIO, *, as_json: bool) -> None:
        self._stdout = stdout
        self.as_json = as_json

    @property
    def is_terminal(self) -> bool:
        """Whether results go to a screen, which can be cleared."""
        return self._stdout.isatty()

    def document(self, document: Document) -> None:
        """One JSON document, or one event of a stream: a line of its own."""
        if self.as_json:
            self._write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")

    def text(self, text: str, end: str = "\n") -> None:
        """A result for people."""
        if not self.as_json:
            self._write(text + end)

    def note(self, text: str) -> None:
        """Progress, warnings and what else is no result: standard error, in either form."""
        print(text, file=sys.stderr, flush=True)

    def error(self, error: PdRelayError) -> None:
        """One line on standard error, and {"error": {"code", "message"}} on standard output with --json."""
        message = " ".join(error.message.split())
        self.note(f"error: {message}")
        self.document({"error": {"code": error.code.value, "message": message}})

    def discard(self) -> None:
        """For a reader that has gone: nothing is written any more, and what is still buffered goes nowhere."""
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), self._stdout.fileno())

    def _write(self, text: str) -> None:
        # What a tokenizer decodes may hold lone surrogates in theory; they must not end the command.
        try:
            self._stdout.write(text.encode("utf-8", "replace").decode("utf-8"))
            self._stdout.flush()
        except BrokenPipeError:
            raise ReaderGone from None


def claim_stdout() -> TextIO:
    """The real standard output as a new file; descriptor 1 becomes a copy of descriptor 2.

    `sys.stdout` is the new file, so that the help text still arrives; a command's body sends `print` to standard
    error by `redirect_prints`.
    """
    sys.stdout.flush()
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    sys.stdout = stdout
    return stdout


def redirect_prints() -> None:
    """From here on a bare `print`, ours or a library's, goes to standard error."""
    sys.stdout = sys.stderr
