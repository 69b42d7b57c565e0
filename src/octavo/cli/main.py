"""The command `octavo`."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from octavo.cli import bench, chat, generate, info, models, serve, terminal
from octavo.errors import OctavoError


class _Commands(TyperGroup):
    """Turns the ways a command can fail into exit codes: 1 an error of ours, 130 Ctrl-C; 2 (usage) is the parser's."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a broken pipe shows here, not while the interpreter goes down
            return result
        except OctavoError as error:
            if os.environ.get("OCTAVO_DEBUG") == "1":
                raise
            terminal.warn("error: " + " ".join(str(error).split()))
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            print(file=sys.stderr)
            raise typer.Exit(130) from error
        except BrokenPipeError as error:  # the reader of a pipe left, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from error


app = typer.Typer(
    name="octavo",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: importing rich would take longer than everything else
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import octavo

        print(f"octavo {octavo.__version__}")
        raise typer.Exit


@app.callback()
def _octavo(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say on stderr what the engine does.")] = False,
) -> None:
    """Octavo runs large language models on CPUs: the same request gives the same bits, whatever else runs."""
    if verbose:
        import logging

        logging.basicConfig(level=logging.INFO, format="octavo: %(message)s", stream=sys.stderr)


app.command()(generate.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(models.pull)
app.command()(models.models)
app.command()(info.info)
app.add_typer(bench.app)


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding shows ? for what it lacks
    app(prog_name="octavo")
