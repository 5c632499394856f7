"""``hal new-plugin NAME``: a package for a device, made from the templates of the kit's distribution."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from . import signals
from .failures import as_typed


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The device's name, such as mychip.")],
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="async: a runtime with streams and events; sync: one without; paddle: a CustomDevice of Paddle's; "
            "torch: a device type of torch's.",
        ),
    ] = "async",
    into: Annotated[
        str, typer.Option(metavar="FOLDER", help="A new or empty folder. Without it, hal-NAME is made here.")
    ] = "",
) -> None:
    """Make a package for a device: entry points, what to fill in, README, tests, CI file."""
    from hal_conformance.scaffold import make

    from hal.discovery import installed

    folder = Path(into or f"hal-{name}")
    with as_typed(name="NAME", kind="--kind", into="--into"), signals.noted():
        made = make(name, kind, folder, {entry.name for entry in installed()})
    signals.check()
    print(f"made in {folder}:")
    print("".join(f"  {path}\n" for path in made), end="")
    print(f"next: pip install -e {shlex.quote(str(folder))}")
    print(f"then write what raises NotImplementedError; {folder / 'README.md'} has the steps")
