"""The ``pichak`` command. Subcommands are imported when they are used, so that help is quick."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from typing import Any

import click

from pichak_coordinator.cli.common import EXIT_INTERRUPTED, EXIT_NOTHING, end_on_sigterm
from pichak_coordinator.cli.encoding import plain_where_needed
from pichak_core import __version__

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

#: name -> (module, attribute, one line of help). The line is here so that help imports nothing.
_COMMANDS: dict[str, tuple[str, str, str]] = {
    "plan": ("pichak_coordinator.cli.plan", "plan", "Derive this machine's fine-tuning plan."),
    "gpu": ("pichak_coordinator.cli.gpu", "gpu", "Fingerprint this machine and its GPU."),
    "disk": ("pichak_coordinator.cli.disk", "disk", "Measure a disk, with the cache bypassed."),
    "net": ("pichak_coordinator.cli.net", "net", "Measure the links between a cluster's nodes."),
    "corpus": ("pichak_coordinator.cli.corpus", "corpus", "Profile a training file in tokens."),
    "fleet": ("pichak_coordinator.cli.fleet", "fleet", "Profile and compare a whole fleet."),
    "agent": ("pichak_coordinator.cli.agent", "agent", "Be a node of a fleet, or a result file."),
    "import": (
        "pichak_coordinator.cli.import_files",
        "import_files",
        "Put result files beside the others.",
    ),
    "export": ("pichak_coordinator.cli.export", "export", "Write stored history to a file."),
    "doctor": ("pichak_coordinator.cli.doctor", "doctor", "Say what is missing here."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported only when one is run or its own help is asked for."""

    commands_table = _COMMANDS

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.commands_table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        entry = self.commands_table.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = getattr(importlib.import_module(entry[0]), entry[1])
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry[2]) for name, entry in self.commands_table.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExamples:\n"
    "  pichak fleet profile --data train.jsonl --model builtin:gpt-1m\n"
    "  pichak plan --data train.jsonl --model builtin:gpt-25m --method lora\n"
    "  pichak disk /mnt/data/model-00001-of-00004.safetensors\n",
)
@click.version_option(__version__, prog_name="pichak")
@click.option("--debug", is_flag=True, help="Show a traceback when something goes wrong.")
@click.pass_context
def app(ctx: click.Context, debug: bool) -> None:
    """Measure what each machine of a rented fleet really gives, and plan the training from it."""
    ctx.obj = {"debug": debug}


def main() -> None:
    """Entry point: every way to end has its exit code, and no traceback without --debug."""
    debug = "--debug" in sys.argv[1:]
    plain_where_needed()
    end_on_sigterm()
    try:
        code: Any = app.main(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("pichak: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit:
        # This is how click ends when the reader went away (`| head`), with a code of its own.
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":
            sys.exit(0)
        raise
    except BrokenPipeError:
        # The reader went away (`| head`).
        _drop_stdout()
        sys.exit(0)
    except OSError as error:
        if error.errno not in _FULL:
            _say_unexpected(error, debug=debug)
        else:
            _drop_stdout()
            click.echo(
                f"pichak: {error.filename or 'the output'} cannot be written ({error.strerror}): "
                "free some room, or write elsewhere",
                err=True,
            )
        sys.exit(EXIT_NOTHING)
    except Exception as error:  # noqa: BLE001 - the last line of defence: a sentence, not a traceback
        _say_unexpected(error, debug=debug)
        sys.exit(EXIT_NOTHING)


def _drop_stdout() -> None:
    """What stdout did not take is let go: the interpreter's own flush would complain again."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_unexpected(error: Exception, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    click.echo(
        f"pichak: {type(error).__name__}: {error} (run with --debug for the traceback)", err=True
    )
