"""The options of every command but ``hal run``, which has its own."""

from __future__ import annotations

import argparse


def parse(arguments: list[str]) -> argparse.Namespace:
    """``version``, or the options of ``hal devices``: ``json``, ``open``, ``timeout``. Exits 2 on bad usage."""
    parser = argparse.ArgumentParser(
        prog="hal", description="One set of worker hooks for LLM inference on any accelerator.", allow_abbrev=False
    )
    parser.add_argument("--version", action="store_true", help="show the versions of hal, contract, Python and Paddle")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    commands.add_parser("run", help="generate text with a model (hal run --help)")
    commands.add_parser("tail", help="print what workers send to a url (hal tail --help)")
    commands.add_parser("conform", help="check that a device keeps the contract (hal conform --help)")
    devices = commands.add_parser(
        "devices",
        help="list the installed devices",
        description="List the installed devices: distribution, contract, whether each can be used here, and why not.",
        allow_abbrev=False,
    )
    devices.add_argument("--json", action="store_true", help="print one JSON object")
    devices.add_argument(
        "--open", action="store_true", help="open each available device in a subprocess and show what it can do"
    )
    devices.add_argument(
        "--timeout", type=seconds, default=120.0, metavar="SECONDS", help="what opening one may take (default 120)"
    )
    devices.add_argument(
        "-v", "--verbose", action="store_true", help="show the traceback of a plugin's own code that failed"
    )
    options = parser.parse_args(arguments)
    if options.command is None and not options.version:
        parser.error("which command? hal run, hal devices, hal tail, hal conform (hal --help says more)")
    if options.command in ("run", "tail", "conform"):
        parser.error(f"put options of hal {options.command} after the word {options.command}")
    return options


def seconds(text: str) -> float:
    """A time to wait, as the type of an option."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0.1 <= number <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 86400")
    return number
