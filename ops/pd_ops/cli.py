"""The `pd-relay` command. Each command is a module of `pd_ops.commands`; what they share is the error boundary here.

Exit codes: 0 done, 1 the check failed, 2 wrong usage or input, 3 the cluster could not do it, 130 interrupted.
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys
from collections.abc import Sequence

import typer

from pd_engine.errors import EXIT_OK, EXIT_USAGE, Internal, InvalidArgument, PdRelayError
from pd_ops.cluster.interrupts import SIGNALS
from pd_ops.output import Interrupted, Output, ReaderGone, claim_stdout

EXIT_INTERRUPTED = 130

log = logging.getLogger(__name__)

# In the order of the help text. Each is the module of that name, "-" as "_", with a function `command`, or an `app` of
# its own for a group of commands.
COMMANDS = (
    "demo", "serve", "up", "down", "submit", "status", "top", "memory", "scale", "autoscale", "drain", "roll", "role",
    "drill", "stop", "generate", "verify", "explain", "trace", "explain-model", "random-model", "doctor", "capacity",
    "bench", "cost", "diagnose", "simulate", "kernels", "version",
)


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The application, with only that command in it that is called: some have heavy imports. All of them for help."""
    app = typer.Typer(
        name="pd-relay", callback=_describe, add_completion=False,
        pretty_exceptions_enable=False, rich_markup_mode=None,
    )
    called = [name for name in arguments[:1] if name in COMMANDS]
    for name in called or COMMANDS:
        module = importlib.import_module(f"pd_ops.commands.{name.replace('-', '_')}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(module.command)
    return app


def _describe() -> None:
    """Serve DeepSeek models from two pools of workers: one reads prompts, the other continues them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console command: never returns, never shows a traceback for a user's mistake."""
    code = run(sys.argv[1:] if arguments is None else list(arguments))
    for number in SIGNALS:  # another Ctrl-C finds a command that has ended
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    output = Output(claim_stdout(), as_json="--json" in arguments)
    try:
        code = build_app(arguments)(args=arguments or ["--help"], standalone_mode=False, obj=output)
        if code == EXIT_INTERRUPTED:  # what Typer makes of a KeyboardInterrupt
            output.document({"interrupted": True})
        return code if isinstance(code, int) else EXIT_OK
    except PdRelayError as error:
        output.error(error)
        return error.exit_code
    except typer.TyperException as error:
        output.error(InvalidArgument(f"{error.format_message().rstrip('.')}; {_help_for(arguments)}"))
        return EXIT_USAGE
    except Interrupted:
        return EXIT_INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        output.document({"interrupted": True})
        return EXIT_INTERRUPTED
    except ReaderGone:
        output.discard()
        return EXIT_OK
    except Exception as error:  # the process boundary
        log.exception("unexpected error")
        internal = Internal(f"{type(error).__name__}: {error}")
        output.error(internal)
        return internal.exit_code


def _help_for(arguments: list[str]) -> str:
    """Where somebody finds what to type instead."""
    called = next((name for name in arguments[:1] if name in COMMANDS), None)
    return "pd-relay --help lists all" if called is None else f"pd-relay {called} --help says what it takes"


if __name__ == "__main__":
    main()
