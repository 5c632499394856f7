"""``hal new-plugin NAME``: a package for a device, made from the templates of the kit's distribution."""

from __future__ import annotations

import shlex
from collections.abc import Collection
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
    from hal.discovery import installed

    made = write(name, kind, into, {entry.name for entry in installed()})
    print(f"then write what raises NotImplementedError; {made / 'README.md'} has the steps")


def write(name: str, kind: str, into: str, taken: Collection[str]) -> Path:
    """Make the package, print what was made and how to install it, and return its folder. ``taken``: installed
    names."""
    from hal_conformance.scaffold import make

    folder = Path(into or f"hal-{name}")
    with as_typed(name="NAME", kind="--kind", into="--into"), signals.noted():
        made = make(name, kind, folder, taken)
    signals.check()
    print(f"made in {folder}:")
    print("".join(f"  {path}\n" for path in made), end="")
    print(f"next: pip install -e {shlex.quote(str(folder))}")
    return folder
