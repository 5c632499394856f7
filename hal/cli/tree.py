"""Tree of commands, in typer. The module of a command is imported when that command is invoked."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from hal import engine_missing
from hal.timeouts import TIMEOUTS

from . import console, failures, signals
from .help import TOGETHER, Row, columns, page

if TYPE_CHECKING:
    from types import ModuleType

    from typer._click import Context, Parameter

    from hal.discovery import Entry

COMMANDS = {
    "run": "generate text with a model",
    "serve": "serve a model over HTTP with OpenAI's routes",
    "devices": "list the installed devices",
    "tail": "print what workers send to a url",
    "conform": "check that a device keeps the contract",
    "new-plugin": "make a package for a device of your own",
    "new-runner": "make a package with a runner around a model of your own",
    "doctor": "check this machine and its plugins",
    "bench": "time the hooks of a device",
}
"""Each command and its description. Its module is an entry point of the group ``hal.commands``; hal's own are imported
by name. The module's function is ``command``, or ``run``, which gets all arguments, beside a table ``TYPED``. Other
distributions may add commands to the group: they are found by name, and not listed by ``hal -h``, which reads no
metadata."""
_OF_THE_ENGINE = {"run", "serve", "tail"}
_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
_AS_GIVEN: dict[str, Any] = {"help_option_names": [], "allow_extra_args": True, "ignore_unknown_options": True}
_SILENT = {"-q", "--quiet", "-h", "--help", "--help-all"}
"""Options with which ``hal run`` shows no status."""
UsageError = typer.TyperException
"""Invalid command line, such as an unknown option or a missing value."""


class Command(TyperCommand):
    """Command with hal's own help page."""

    def get_params(self, ctx: Context) -> list[Parameter]:
        """Return the parameters."""
        return _defaults_kept(super().get_params(ctx))

    def get_help(self, ctx: Context) -> str:
        """Return the help page; groups of options are shown by ``--help-all`` alone."""
        return self.page_of(ctx, all_groups=all(param.name != "help_all" for param in self.params))

    def page_of(self, ctx: Context, *, all_groups: bool) -> str:
        """Return the help page, with the options of all groups or of none."""
        params = [param for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        arguments = [param for param in params if param.param_type_name == "argument"]
        groups: dict[str, list[Row]] = {"": []}
        for param in params:
            if param.param_type_name == "option":
                groups.setdefault(getattr(param, "rich_help_panel", None) or "", []).append(_row(param))
        tables = [(f"{name.capitalize()} options" if name else "Options", rows) for name, rows in groups.items()]
        usage = " ".join([ctx.command_path, "[OPTIONS]", *map(_usage, arguments)])
        wanted = tables if all_groups else tables[:1]
        return page(usage, self.help or "", [("", [*map(_row, arguments)]), *wanted], columns())

    def invoke(self, ctx: Context) -> Any:  # noqa: ANN401 (what the command returns)
        """Run the command; its errors name what gave an option its value."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            name_origin(error, ctx)
            raise


class Tree(TyperGroup):
    """Root command with hal's own help page."""

    def get_params(self, ctx: Context) -> list[Parameter]:
        """Return the parameters."""
        return _defaults_kept(super().get_params(ctx))

    def get_help(self, ctx: Context) -> str:
        """Return the help page."""
        about = f"{self.help}\n\nhal COMMAND -h describes a command."
        sections = [("Commands", [*COMMANDS.items()]), ("Options", [*map(_row, self.get_params(ctx))])]
        return page(f"{ctx.command_path} [OPTIONS] COMMAND ...", about, sections, columns())

    def get_command(self, ctx: Context, cmd_name: str) -> Any:  # noqa: ANN401 (typer's command, or None)
        """Return a command: of the table, or of another distribution."""
        found = super().get_command(ctx, cmd_name)
        if found is None and any(entry.name == cmd_name for entry in _entries()):
            return _Lazy(cmd_name)
        return found


class _Lazy(TyperCommand):
    """Placeholder of a command until it is invoked."""

    def make_context(self, *given: Any, **options: Any) -> Context:  # noqa: ANN401 (those of typer)
        """Import the command's module and parse the command's arguments."""
        if self.name == "run" and not options.get("resilient_parsing"):
            console.quiet = not {*given[1]}.isdisjoint(_SILENT)
            console.status("starting")  # before the slow imports
        module, settings = _module(str(self.name)), _HELP
        TIMEOUTS.check()
        if (function := getattr(module, "command", None)) is None:
            settings = _AS_GIVEN

            def function(ctx: typer.Context) -> None:
                with failures.as_typed(**module.TYPED):
                    module.run(ctx.args)

        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(self.name, cls=Command, context_settings=settings)(function)
        return get_command(app).make_context(*given, **options)


def _module(name: str) -> ModuleType:
    """Import a command's module. Raises :class:`hal_core.Unavailable` for one of the engine, where it is missing."""
    if name in COMMANDS and name not in _OF_THE_ENGINE:
        return import_module(f".{name.replace('-', '_')}", __package__)
    for entry in _entries():
        if entry.name == name:
            with signals.held():  # NumPy starts threads
                return import_module(entry.target)
    raise engine_missing(f"hal {name}")


def _entries() -> tuple[Entry, ...]:
    """Return the entries of the group ``hal.commands``."""
    from hal.discovery import COMMANDS as GROUP
    from hal.discovery import installed_in

    return installed_in(GROUP)


def invoke(arguments: list[str]) -> None:
    """Run a command line. Raises :class:`UsageError`, and SystemExit with a command's status."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(cls=Tree, invoke_without_command=True, context_settings=_HELP)(_root)
    root = get_command(app)
    assert isinstance(root, Tree)
    for name, about in COMMANDS.items():
        root.add_command(_Lazy(name, help=about))
    status = root.main(args=arguments, prog_name="hal", standalone_mode=False)
    if isinstance(status, int):
        raise SystemExit(status)


def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the versions of hal, contract, Python and Paddle.")
    ] = False,
) -> None:
    """One set of worker hooks for LLM inference on any accelerator."""
    if version:
        from .versions import lines

        print("\n".join(lines()))
    elif ctx.invoked_subcommand is None:
        raise UsageError(f"which command? {', '.join(f'hal {name}' for name in COMMANDS)} (hal --help describes them)")


def usage_line(error: typer.TyperException) -> str:
    """Return the error line of an invalid command line: the option as typed, the mistake, the cure."""
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    what, option = failures.one_line(error.format_message()), getattr(error, "option_name", "")
    listed = "commands" if isinstance(getattr(context, "command", None), Tree) else "options"
    cure = f"{context.command_path} -h lists the {listed}" if context is not None else ""
    if possible := getattr(error, "possibilities", None):
        what, cure = "no such option", f"did you mean {' or '.join(possible[:2])}?"
    elif what.startswith("No such option"):
        what = "no such option"
    elif "requires an argument" in what:
        what = "it needs a value"
    elif param is not None and isinstance(error, typer.BadParameter):
        option = _origin(param, context) if param.param_type_name == "option" else param.metavar
        missing = what.startswith("Missing")
        what, cure = (_mistaken(error) or (what, "")) if not missing else ("it is missing", cure)
    elif "unexpected extra argument" in what:
        what = f"it takes no argument {what.rpartition('(')[2].rstrip(')')!r}"
    elif what.startswith("No such command"):
        what = what[0].lower() + what[1:]
    head, _, meant = what.partition(" Did you mean ")
    if meant:
        what, cure = head.rstrip("."), f"did you mean {meant.replace(', ', ' or ')}"
    what = f"{option}: {what}" if option and option not in what else what.rstrip(".")
    return f"{what} ({cure})" if cure else what


def name_origin(error: Exception, ctx: Context) -> Exception:
    """Have an error about an option's value name the environment variable, or the line of ``--config``, that gave it;
    return the error."""
    attribute = "argument" if getattr(error, "argument", "") else "what"  # of another process: what has all of it
    name, colon, text = getattr(error, attribute, "").partition(":")
    for param in ctx.command.params if name.startswith("-") else ():
        if name in param.opts:
            setattr(error, attribute, f"{_origin(param, ctx)}{colon}{text}")
    return error


def _origin(param: Parameter, ctx: Context | None) -> str:
    """Return the option as typed, the environment variable, or the file and its key."""
    source = ctx.get_parameter_source(str(param.name)) if ctx is not None else None
    if ctx is not None and source is not None and source.name == "DEFAULT_MAP":
        return f"--config: {ctx.params['config']}: {str(param.name).replace('_', '-')}"
    is_variable = source is not None and source.name == "ENVIRONMENT"
    return str(param.envvar) if is_variable else param.opts[0]


def _mistaken(error: BaseException) -> tuple[str, str] | None:
    """Return the mistake in a value that is no number or out of its range, and the cure; None for other errors."""
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    kinds = {"int_parsing": "whole number", "float_parsing": "number", "bool_parsing": "boolean"}
    bounds = {"less_than_equal": "at most {le}", "greater_than_equal": "at least {ge}"}
    for one in found:
        if one["type"] in kinds:
            return f"{one['input']!r} is no {kinds[one['type']]}", ""
        if one["type"] in bounds:
            return str(one["input"]), f"give a number of {bounds[one['type']].format(**one['ctx'])}"
    return None


def _defaults_kept(params: list[Parameter]) -> list[Parameter]:
    """Skip the conversion of default values: for each conversion typer imports pydantic, which takes 70 ms."""
    for param in params:
        vars(param)["process_value"] = partial(_converted, param)
    return params


def _converted(param: Parameter, ctx: Context, value: Any) -> Any:  # noqa: ANN401 (of the parameter's type)
    """Convert a given value; return a default unchanged."""
    is_default = value is None or value == param.default or value == ()
    if is_default and not getattr(param, "required", False):
        return [] if value is None and (getattr(param, "multiple", False) or param.nargs == -1) else value
    return type(param).process_value(param, ctx, value)


def _usage(argument: Parameter) -> str:
    name = str(argument.metavar) if argument.required else f"[{argument.metavar}]"
    return name + "..." * (argument.nargs == -1)


def _row(param: Parameter) -> Row:
    """Return an option's names with the placeholder of its value, and its help with its default."""
    about, default = getattr(param, "help", "") or "", param.default
    if param.param_type_name == "argument":
        return f"{param.metavar}{'...' * (param.nargs == -1)}", about
    names = ", ".join(sorted(param.opts, key=len))
    if not getattr(param, "is_flag", False):
        names += f" {param.metavar}"
    if getattr(param, "show_default", False) and type(default) in (str, int, float) and default != "":
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        about += f" (default:{TOGETHER}{shown})"
    return names, about


def all_options(ctx: typer.Context, wanted: bool) -> None:
    """Print the help page with the options of all groups, and exit (``--help-all``)."""
    if wanted:
        assert isinstance(ctx.command, Command)
        print(ctx.command.page_of(ctx, all_groups=True))
        raise typer.Exit
