"""The typer application behind ``hal``: the commands and their options, with the work done elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from typer.core import TyperCommand


class Commands(TyperGroup):
    """Imports hal.cli.run, with the engine behind it, only for ``hal run``; ``hal --help`` shows the stub."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 (typer's classes here move about)
        if args[:1] == ["run"]:
            self.commands["run"] = _run_command()
        return super().resolve_command(ctx, args)


application = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help and errors: half the import time, and one line for each error
)


def _run_command() -> TyperCommand:
    from .run import run

    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    single.command("run")(run)
    command: TyperCommand = typer.main.get_command(single)  # type: ignore[assignment]  # one command: no group
    return command


def _show_versions(wanted: bool) -> None:
    if wanted:
        from .versions import lines

        print("\n".join(lines()))
        raise typer.Exit


@application.callback()
def hal(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_versions,
            is_eager=True,
            help="Show the versions of hal, the contract, Python and Paddle.",
        ),
    ] = False,
) -> None:
    """One set of worker hooks for LLM inference on any accelerator."""


@application.command("run")
def run() -> None:
    """Generate text with a model (hal run --help)."""
    raise AssertionError("the stub is replaced when `hal run` is invoked")


@application.command("devices")
def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    opened: Annotated[
        bool, typer.Option("--open", help="Open each available device in a subprocess and show what it can do.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds that opening one device may take.", min=0.1, max=86400)
    ] = 120.0,
) -> None:
    """List the installed devices: distribution, contract, whether each can be used here, and why not."""
    from .devices import show

    show(as_json=as_json, opened=opened, timeout=timeout)
