"""``hal run``: builds typer's parameters from the fields of its options, and checks them before anything runs."""

from __future__ import annotations

import inspect
import os
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from hal_core import PluginError

from hal.cli import failures
from hal.cli.console import say
from hal.cli.tree import all_options
from hal_engine.mkl import kernels_note

from .run_options import Options, RankOptions, Sampling
from .run_plan import read_prompts

_FIRST = ("model", "device", "max_tokens", "temperature", "top_p", "seed", "as_json", "quiet", "verbose")
"""Options of the short help, in its order."""


def command(ctx: typer.Context, **given: Any) -> None:  # noqa: ANN401 (as the fields say)
    """Generate text with a model: the small one that ships, or a Llama-, Mistral-, Qwen2- or Qwen3-style checkpoint.

    A pipe or a file on standard input is read for prompts, one a line, where no other is given.
    """
    failures.verbose = given["verbose"]
    if given["verbose"] and (note := kernels_note(os.environ)):
        say(f"hal: {note}")
    sampling = Sampling(**_of(Sampling, given))
    sampling.params()
    options = Options(**_of(Options, given), ranks=RankOptions(**_of(RankOptions, given)))
    if not _from_objects(given["prompts"]):  # its lines may sample, and do not need --json
        sampling.check_given([name for name in given if _was_given(ctx, name)])
    prompts = read_prompts(given["texts"] or (), given["prompt"] or (), given["prompts"], sampling)
    options.check_shown(prompt.sampling for prompt in prompts.prompts)
    from .run_session import generate

    try:
        sink = {} if options.sink is None else {"sink": "--sink"}
        with failures.as_typed(**sink, url="--sink", prompt="PROMPT", name="--device"):
            code = generate(prompts, options)
    except SystemExit as end:  # hal raises no SystemExit here, and its status could be 0
        what = f"a runner or plugin called sys.exit({'' if end.code is None else repr(end.code)}) during the run"
        raise PluginError(what, cure="have it raise an error instead; -v shows where") from end
    raise typer.Exit(code)


def _from_objects(file: Path | None) -> bool:
    return file is not None and file.suffix == ".jsonl"


def _was_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _of(kind: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a kind of options, read from the parsed parameters."""
    told = {one.name: one.metadata["option"]["read"] for one in _options(kind)}
    return {name: given[name] if read is None else read(given[name]) for name, read in told.items()}


def _options(kind: type[Any]) -> list[Field[Any]]:
    return [one for one in fields(kind) if "option" in one.metadata]


def _parameter(one: Field[Any], hints: dict[str, Any]) -> inspect.Parameter:
    told = one.metadata["option"]
    names = told["names"] or [f"--{one.name.replace('_', '-')}"]
    default = None if told["read"] is not None or one.default is MISSING else one.default
    info = typer.Option(
        *names, help=told["about"], metavar=told["value"] or None, rich_help_panel=told["group"] or None
    )
    kind = told["typed"] or hints[one.name]
    annotation = Annotated[kind, info]  # type: ignore[valid-type]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _signature() -> inspect.Signature:
    """Return the command's parameters: prompts, then the fields of all options."""

    def prompts(
        ctx: typer.Context,
        *,
        texts: Annotated[
            list[str] | None,
            typer.Argument(metavar="PROMPT", help="A text to continue; -: standard input, one a line."),
        ] = None,
        prompts: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                help="A file with one prompt a line. FILE.jsonl: an object a line (prompt, sampling parameters).",
            ),
        ] = None,
        prompt: Annotated[
            list[str] | None,
            typer.Option(metavar="TEXT", help="A text to continue, as PROMPT.", rich_help_panel="prompt"),
        ] = None,
        help_all: Annotated[
            bool, typer.Option("--help-all", is_eager=True, callback=all_options, help="Show all options and exit.")
        ] = False,
    ) -> None: ...

    own = inspect.signature(prompts, eval_str=True).parameters
    made = {
        one.name: _parameter(one, get_type_hints(kind))
        for kind in (Sampling, Options, RankOptions)
        for one in _options(kind)
    }
    found = own | made
    first = ("ctx", "texts", "prompts", *_FIRST)
    return inspect.Signature(
        [*(found[name] for name in first), *(one for name, one in found.items() if name not in first)]
    )


command.__signature__ = _signature()  # type: ignore[attr-defined]
command.__annotations__ = {name: one.annotation for name, one in _signature().parameters.items()}
