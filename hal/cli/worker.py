"""``hal worker --role prefill|decode --listen URL``: a worker of a split, for a ``hal run --workers`` on any host."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import signals
from .arguments import seconds
from .console import say


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the options of ``hal worker``. Exits 2 on bad usage."""
    parser = argparse.ArgumentParser(
        prog="hal worker",
        description="Wait for a hal run --workers, prefill prompts or decode for it, and end with it.",
        allow_abbrev=False,
    )
    where = "ipc:///folder/name, or tcp://host:port with the address by which the other hosts reach this one"
    parser.add_argument("--role", choices=("prefill", "decode"), required=True, help="what it does of each request")
    parser.add_argument("--listen", metavar="URL", required=True, help=where)
    kept = "with tcp: a file with the key of the job, the same for all; made if there is none"
    parser.add_argument("--key", metavar="FILE", type=Path, help=kept)
    parser.add_argument("--tp", metavar="N", type=int, default=1, help="split the model over so many ranks")
    parser.add_argument("--model", metavar="DIR", type=Path, help="a checkpoint directory, as hal run is given it")
    waits = "end when no engine came for so long (default 300)"
    parser.add_argument("--timeout", type=seconds, default=300.0, metavar="SECONDS", help=waits)
    return parser.parse_args(arguments)


def run(arguments: list[str]) -> None:
    """Serve one engine to its end; the exit status is 0 if all went well, 1 where ranks or the engine were lost, 2
    for what is refused."""
    options = parse(arguments)
    from hal_core import GroupLost, InvalidValue
    from hal_core.devices import check_processor

    from hal.distributed.hired import HiredWorker, Post
    from hal.distributed.hiring import job_keys
    from hal.distributed.rank import versions
    from hal.model import DEFAULT_CHECKPOINT
    from hal.model.config import read_config
    from hal.model.split import check_split

    check_processor()  # before an engine asks for ranks, which import Paddle
    model = options.model or DEFAULT_CHECKPOINT
    if options.tp < 1:
        raise InvalidValue(f"{options.tp}", cure="give a whole number of at least 1", argument="--tp")
    check_split(read_config(model), options.tp)
    try:
        keys = job_keys(options.listen, options.key, make=True)
        post = Post(options.role, options.tp, options.listen, model, options.key)
        with signals.noted(), HiredWorker(post, keys, versions()) as worker:
            say(f"hal worker: {options.role}, listens on {worker.url}")
            status = worker.serve(options.timeout, signals.check)
            how = f" ({worker.how})" if worker.how else ""
    except InvalidValue as error:
        if error.argument == "url":
            error.argument = "--listen"
        raise
    except GroupLost as error:
        say(f"hal: error: {error}")
        status, how = 1, ""
    if status:
        say(f"hal worker: ended, {'refused' if status == 2 else 'its ranks or its engine were lost'}{how}")
        raise SystemExit(status)
