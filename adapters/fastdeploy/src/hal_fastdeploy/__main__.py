"""``python -m hal_fastdeploy compare A B``: two model runner classes of an installed FastDeploy, by kind of task."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .comparing import CASES, Make, compare, tensor


def main(arguments: Sequence[str] | None = None, make: Make = tensor) -> int:
    """Print what differs. Return 0 for no difference, 1 for some, 2 for a class that cannot be loaded."""
    parser = argparse.ArgumentParser(prog="python -m hal_fastdeploy", description=__doc__)
    command = parser.add_subparsers(required=True, metavar="compare").add_parser("compare", help="two runner classes")
    command.add_argument("first", metavar="A", help="MODULE:CLASS")
    command.add_argument("second", metavar="B", help="MODULE:CLASS")
    command.add_argument("--draws", type=int, default=40, help="requests of each kind of task (%(default)s)")
    command.add_argument("--seed", type=int, default=0, help="of what is drawn (%(default)s)")
    given = parser.parse_args(arguments)
    try:
        first, second = _loaded(given.first), _loaded(given.second)
    except (ImportError, AttributeError, ValueError) as error:
        what = f"python -m hal_fastdeploy: error: {error} (name MODULE:CLASS of an installed FastDeploy)"
        print(what, file=sys.stderr)
        return 2
    found = compare(first, second, draws=given.draws, seed=given.seed, make=make)
    for case in CASES:
        for one in [one for one in found if one.case == case]:
            print(f"{case}: {one.name} differs in {one.count} of {given.draws}, first {one.example}")
    if not found:
        print(f"no difference in {given.draws} requests of each kind: {', '.join(CASES)}")
    return int(bool(found))


def _loaded(path: str) -> type[Any]:
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"{path!r} names no class")
    found: type[Any] = getattr(import_module(module), name)
    return found


if __name__ == "__main__":
    sys.exit(main())
