"""``hal new-runner NAME``: a package with a runner of hal's engine, from the templates of the kit."""

from __future__ import annotations

from typing import Annotated

import typer

from .new_plugin import write


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The runner's name, such as mymodel.")],
    into: Annotated[
        str, typer.Option(metavar="FOLDER", help="A new or empty folder. Without it, hal-NAME is made here.")
    ] = "",
) -> None:
    """Make a package with a runner: a model of your own behind hal's scheduler, server and ranks."""
    from hal.discovery import RUNNERS, installed_in

    made = write(name, "runner", into, {entry.name for entry in installed_in(RUNNERS)})
    print(f"then put your model in the place of Model; {made / 'README.md'} has the steps")
