"""``hal bench``: what the hooks of a device take, by size; and two such results beside each other."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer
from hal_core import HalError, InvalidValue

from hal.timeouts import TIMEOUTS

from . import failures, logs, signals
from .console import columns_of, fitted

if TYPE_CHECKING:
    from hal_core import BoundDevice

SLOTS, PROMPT, BLOCK = 128, 256, 16
_Case = tuple[str, str, Callable[[], Callable[[], Any]]]
"""Hook, size, and what prepares a call, which returns a ticket."""
_COLUMNS = (("call", "call_us"), ("done", "done_us"))


def command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The device, as for hal run.")] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=10, help="Calls of each row, which take turns.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for --compare.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Compare two results of --json, in place of a device."),
    ] = None,
) -> None:
    """Time the hooks of a device by size: microseconds of the call, and until its work is done."""
    if compare is not None:
        if name is not None or as_json:
            given = "NAME" if name is not None else "--json"
            raise InvalidValue("nothing is measured with --compare", cure="leave it out", argument=given)
        _compare(*[_read(file) for file in compare])
        return
    with failures.as_typed(**{"--device": "NAME"}), signals.noted(), logs.printed(logs.level()):
        found = _measured(name, rounds)
    if as_json:
        print(json.dumps(found))
        return
    _head(f"{found['device']}, {found['versions']}, {found['date']}; microseconds, median and 90th percentile")
    _print(["hook", "size", *(f"{title}{part}" for title, _ in _COLUMNS for part in ("", ", p90"))], _cells(found))


def _measured(name: str | None, rounds: int) -> dict[str, Any]:
    """Return the result for a device, which is opened for it."""
    from hal.opening import open_for_command

    from .versions import lines

    with open_for_command(name, {}) as bound:
        cases = list(_cases(bound))
        times: dict[tuple[str, str], list[tuple[float, float]]] = {(hook, size): [] for hook, size, _ in cases}
        for number in range(-3, rounds):  # the first ones warm up
            for hook, size, prepare in cases:
                signals.check()
                call = prepare()
                began = time.perf_counter()
                ticket = call()
                called = time.perf_counter()
                ticket.wait(TIMEOUTS.device_open)
                if number >= 0:
                    times[hook, size].append((called - began, time.perf_counter() - began))
        rows = [
            {
                "hook": hook,
                "size": size,
                "call_us": _summary([one for one, _ in taken]),
                "done_us": _summary([two for _, two in taken]),
            }
            for (hook, size), taken in times.items()
        ]
        return {
            "device": bound.name,
            "versions": ", ".join(lines()[:-1]),
            "machine": f"{platform.machine()}, {platform.system()}",
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "rounds": rounds,
            "rows": rows,
        }


def _summary(seconds: list[float]) -> dict[str, float]:
    """Return microseconds: the least, quartiles and the 90th percentile."""
    tenths, quarters = quantiles(seconds, n=10), quantiles(seconds, n=4)
    named = {"min": min(seconds), "p25": quarters[0], "p50": quarters[1], "p75": quarters[2], "p90": tenths[8]}
    return {part: round(value * 1e6, 2) for part, value in named.items()}


def _cases(bound: BoundDevice) -> Iterator[_Case]:
    """Yield what is called: insertions, values, a step's output."""
    import numpy as np
    from hal_core import Group, MemorySink, Request, SamplingParams, StateConfig, Step, Task, TaskKind

    state = bound.state(StateConfig(num_slots=SLOTS, max_model_len=4 * PROMPT, block_size=BLOCK), name="bench")
    stream, params, prompt = bound.default_stream, SamplingParams(max_tokens=PROMPT), list(range(1, PROMPT + 1))
    blocks = [np.arange(PROMPT // BLOCK, dtype=np.int32) + at * (PROMPT // BLOCK) for at in range(SLOTS)]

    def inserting(count: int) -> Callable[[], Callable[[], Any]]:
        def prepare() -> Callable[[], Any]:
            state.release(range(count))
            requests = state.admit_all([Request(f"r{at}", prompt, params) for at in range(count)])
            tasks = [Task(TaskKind.PREFILL, at, one, 0, PROMPT, blocks[at]) for at, one in enumerate(requests)]  # type: ignore[arg-type]  # none is refused
            return lambda: bound.insert_tasks(state=state, tasks=tasks, stream=stream)

        return prepare

    for count in (1, 16, SLOTS):
        yield "insert_tasks", f"{count} of {PROMPT} tokens", inserting(count)
    table = state.view("token_ids")
    targets: dict[str, tuple[Any, Any]] = {
        "one value": (state.view("temperature")[3], 0.5),
        f"{PROMPT} tokens": (table[3, :PROMPT], np.arange(PROMPT)),
        f"{SLOTS} x {4 * PROMPT} tokens": (table, np.zeros(table.shape, np.int64)),
    }
    for size, (target, value) in targets.items():

        def put(target: Any = target, value: Any = value) -> Any:  # noqa: ANN401
            return bound.async_set_value(target=target, value=value, stream=stream)

        yield "async_set_value", size, lambda put=put: put  # type: ignore[misc]  # of this turn
    sink, number = MemorySink(), iter(range(1 << 62))

    def save() -> Callable[[], Any]:
        sink.records.clear()
        step = Step(next(number), {"bench": np.arange(SLOTS, dtype=np.int32)})
        return lambda: bound.save_output(state=state, step=step, sink=sink, stream=stream)

    yield "save_output", f"{SLOTS} slots", save
    yield (
        "broadcast_tokens",
        "1 rank",
        lambda: lambda: bound.broadcast_tokens(state=state, group=Group(), stream=stream),
    )


def _read(file: Path) -> dict[str, Any]:
    """Return a result of ``--json``. Raises :class:`InvalidValue`, naming the file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        for row in found["rows"]:
            _ = row["hook"], row["size"], *(1 / row[part][one] for _, part in _COLUMNS for one in ("p25", "p50", "p75"))
        _ = found["device"], found["date"]
    except OSError as error:
        raise InvalidValue(f"{file}: {error.strerror}", cure="give two files", argument="--compare") from error
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        cure = "make it with: hal bench --json > FILE"
        raise InvalidValue(f"{file} is no result", cure=cure, argument="--compare") from error
    result: dict[str, Any] = found
    return result


def _compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Print the ratio of the medians of each row, and within which quartiles differ; a ratio inside says nothing."""
    former = {(row["hook"], row["size"]): row for row in before["rows"]}
    cells = []
    for row in after["rows"]:
        if (old := former.get((row["hook"], row["size"]))) is None:
            continue
        line = [row["hook"], row["size"]]
        for _, part in _COLUMNS:
            one, two = old[part], row[part]
            least, most = two["p25"] / one["p75"], two["p75"] / one["p25"]
            line += [f"{two['p50'] / one['p50']:.2f}", f"{least:.2f} to {most:.2f}", "" if least <= 1 <= most else "*"]
        cells.append(line)
    if not cells:
        raise HalError("the two results have no row in common", cure="make both with one version of hal bench")
    _head(
        f"B ({after['device']}, {after['date']}) / A ({before['device']}, {before['date']}); below 1: B is faster",
        "medians, and of the quartiles (*: they lie apart; a busy machine does that too)",
    )
    _print(["hook", "size", *(head for title, _ in _COLUMNS for head in (title, "spread", ""))], cells)


def _cells(found: Mapping[str, Any]) -> list[list[str]]:
    return [
        [row["hook"], row["size"], *(f"{row[part][one]:.1f}" for _, part in _COLUMNS for one in ("p50", "p90"))]
        for row in found["rows"]
    ]


def _head(*lines: str) -> None:
    print(fitted("\n".join(lines), sys.stdout, every=True), end="\n\n")


def _print(heads: list[str], cells: list[list[str]]) -> None:
    """Print a table. On a terminal too narrow for it, each hook has a line of its own above its sizes."""
    widths = [max(len(line[at]) for line in (heads, *cells)) for at in range(len(heads))]
    is_narrow = sys.stdout.isatty() and sum(widths) + 2 * len(widths) - 2 > columns_of(sys.stdout)
    hook = ""
    for line in (heads, *cells):
        texts = [
            text.ljust(width) if at < 2 else text.rjust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        if is_narrow and line[0] != hook:
            print(hook := line[0])
        print("  ".join(["", *texts[1:]] if is_narrow else texts).rstrip())
