"""``hal vllm check``: does the installed vLLM write the same bytes over a device, and by an author's kernels?"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Annotated, Any

import typer
from hal_core import InvalidValue


def command(
    action: Annotated[str, typer.Argument(metavar="check", help="What to do; there is check alone.")],
    device: Annotated[
        str, typer.Option(metavar="NAME", help="A hal device; without it, that of vLLM's platform.")
    ] = "",
    kernels: Annotated[
        str,
        typer.Option(metavar="MODULE:NAME", help="An author's kernels: a dict of vLLM's qualified names to functions."),
    ] = "",
    count: Annotated[int, typer.Option(metavar="N", help="Drawn sequences.", min=1)] = 30,
    first: Annotated[int, typer.Option(metavar="N", help="The first sequence's number.", min=0)] = 0,
) -> None:
    """Compare vLLM's own classes and kernels, interpreted by Triton, with those over a hal device: the same bytes after
    every call. Lists what of vLLM looks otherwise than hal knows.

    The exit status is 0 if nothing differs, 1 if anything does.
    """
    if action != "check":
        raise InvalidValue(f"{action!r}", cure="give check", argument="check")
    own = _kernels(kernels)
    from .checking import check, interpreted

    began = time.monotonic()
    interpreted()
    report = check(device, count=count, first=first, kernels=own)
    for line in report.changed:
        print(f"looks otherwise  {line}")
    for what, where in report.differing.items():
        print(f"differs          {where}")
        report.counts.pop(what, None)
    for what in sorted(report.counts):
        print(f"same             {what}: {report.counts[what]} calls")
    print(f"{count} sequences in {time.monotonic() - began:.0f} s")
    if report.changed or report.differing:
        raise typer.Exit(1)


def _kernels(text: str) -> dict[str, Any]:
    """Return the dict that ``MODULE:NAME`` names. Triton must not be imported by it."""
    if not text:
        return {}
    module, _, name = text.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        cure = "give an importable module and a name in it, as my_platform.kernels:KERNELS"
        raise InvalidValue(f"{text!r}: {error}", cure=cure, argument="--kernels") from error
    if not isinstance(found, dict):
        cure = 'give {"vllm.v1.worker.gpu.input_batch._post_update_kernel": function, …}'
        raise InvalidValue(f"{text!r} is no dict", cure=cure, argument="--kernels")
    return found
