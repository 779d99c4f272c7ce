"""The `pd-relay` command. Each command is a module of `pd_ops.commands`; what they share is the error boundary here.

Exit codes: 0 done, 1 the check failed, 2 wrong usage or input, 3 the cluster could not do it, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import typer

from pd_engine.errors import EXIT_OK, EXIT_USAGE, Internal, InvalidArgument, PdRelayError
from pd_ops.commands import (
    bench,
    demo,
    doctor,
    explain_model,
    generate,
    random_model,
    serve,
    status,
    stop,
    submit,
    verify,
    version,
)
from pd_ops.output import Output, ReaderGone, claim_stdout

EXIT_INTERRUPTED = 130

log = logging.getLogger(__name__)

app = typer.Typer(
    name="pd-relay",
    help="Serve DeepSeek models from two pools of workers: one reads prompts, the other continues them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.command)
app.command("serve")(serve.command)
app.command("submit")(submit.command)
app.command("status")(status.command)
app.command("stop")(stop.command)
app.command("generate")(generate.command)
app.command("verify")(verify.command)
app.command("explain-model")(explain_model.command)
app.command("random-model")(random_model.command)
app.command("doctor")(doctor.command)
app.add_typer(bench.app, name="bench")
app.command("version")(version.command)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console command: never returns, never shows a traceback for a user's mistake."""
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    output = Output(claim_stdout(), as_json="--json" in arguments)
    try:
        code = app(args=arguments, standalone_mode=False, obj=output)
        return code if isinstance(code, int) else EXIT_OK
    except PdRelayError as error:
        output.error(error)
        return error.exit_code
    except typer.TyperException as error:
        output.error(InvalidArgument(error.format_message()))
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except ReaderGone:
        output.discard()
        return EXIT_OK
    except Exception as error:  # the process boundary
        log.exception("unexpected error")
        internal = Internal(f"{type(error).__name__}: {error}")
        output.error(internal)
        return internal.exit_code


if __name__ == "__main__":
    main()
