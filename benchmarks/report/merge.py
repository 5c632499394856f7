"""The files of the measurements as one page of tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def merged(files: Sequence[Path]) -> str:
    """One part for each file."""
    lines: list[str] = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        facts = found["facts"]
        versions = ", ".join(f"{name} {what}" for name, what in facts["versions"].items() if what != "none")
        lines += [f"## {found['kind']}", "", f"    {facts['command']}", ""]
        lines += [f"{facts['date']}, {'; '.join(facts['gpus'])}, {facts['cpus']} cores, Python {facts['python']}, "]
        lines += [f"{versions}; took {found['took_s']:.0f} s.", "", *PARTS[found["kind"]](found), ""]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|---" + "|---:" * (len(head) - 1) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _hooks(found: Found) -> Iterator[str]:
    rows = found["rows"]
    ways = list(next(iter(rows.values())))
    head = ["host us, median / p99", *ways, "cold / hot", "busy 1 / hot"]
    made = [
        [name, *(f"{one[0]:.1f} / {one[1]:.1f}" for one in row.values())]
        + [f"{row[way][0] / row['hot'][0]:.2f}" for way in ("cold", "busy 1")]
        for name, row in rows.items()
    ]
    yield from _table(head, made)
    yield ""
    yield f"The interpreter's lock was given up {found['lock_given_up']} times by hal's native calls."


def _how(row: Found) -> str:
    interval = "" if row["interval"] is None else f", switch interval {row['interval'] * 1e3:g} ms"
    load = f"beside {row['busy']} busy{interval}" if row["busy"] else "quiet"
    return f"{'overlapped' if row['overlap'] else 'waiting'}, {load}"


def _decode(found: Found) -> Iterator[str]:
    """hal and the plain loop beside each other; both against the quiet, overlapped run of their own."""
    rows = found["rows"]
    cases: dict[tuple[Any, ...], dict[str, Found]] = {}
    for row in rows:
        case = (row["shape"], row["slots"], row["answers"], _how(row))
        cases.setdefault(case, {})[row["loop"]] = row
    made = []
    for case, loops in cases.items():
        base = cases[*case[:3], "overlapped, quiet"]
        cells = [f"{case[0]}, {case[1]} slots, {case[2]} answers", case[3]]
        for loop in ("hal", "plain"):
            cells.append(f"{loops[loop]['tokens_per_s']:.0f}" if loop in loops else "-")
        ours = loops["hal"]["tokens_per_s"]
        cells.append(f"{ours / loops['plain']['tokens_per_s']:.3f}" if "plain" in loops else "-")
        cells.append(f"{ours / base['plain']['tokens_per_s']:.3f}")
        cells.append(f"{ours / base['hal']['tokens_per_s']:.3f}")
        made.append(cells)
    head = ["", "", "hal, tokens/s", "plain loop", "hal / plain so", "hal / plain overlapped, quiet", "hal / hal so"]
    yield from _table(head, made)


def _prefill(found: Found) -> Iterator[str]:
    head = ["prompts", "products and attention, ms", "step, ms", "times", "beside decoding slots, ms"]
    yield from _table(
        head,
        [
            [
                row["prompts"],
                *(f"{row[key]:.2f}" for key in ("bare", "step")),
                f"{row['ratio']:.3f}",
                f"{row['mixed']:.2f}",
            ]
            for row in found["rows"]
        ],
    )
    yield ""
    yield f"Decoding alone: {found['decode']:.2f} ms; captured in {found['capture_s']:.1f} s."


def _contexts(found: Found) -> Iterator[str]:
    yield (
        f"{found['shape']}, one request; copies move {found['bandwidth'] / 1e12:.2f} TB/s. Floor: the keys' and "
        "values' bytes at that rate, and a token at 128."
    )
    yield ""
    head = ["tokens before", "chunk", "to the first token, ms", "a token, ms", "floor, ms", "times"]
    made = [
        [
            *(str(row["context"]), str(row["chunk"]), f"{row['first']:.1f}"),
            *(f"{row['between']:.3f}", f"{row['floor']:.3f}", f"{row['between'] / row['floor']:.2f}"),
        ]
        for row in found["rows"]
    ]
    yield from _table(head, made)
    yield ""
    if found["forward"] is not None:
        yield f"transformers' forward of the longest, SDPA, one row of logits: {found['forward']:.1f} ms."
    many = found["many"]
    times = ", ".join(f"{ms:.0f} ms in chunks of {chunk}" for chunk, ms in many["last"].items())
    bare = "" if many["bare"] is None else f"; products and attention alone {many['bare']:.0f} ms"
    yield f"{many['shape']}, {many['count']} prompts of {many['length']}: the last first token after {times}{bare}."


def _arrivals(found: Found) -> Iterator[str]:
    yield (
        f"{found['shape']}, {found['slots']} slots, {found['rate']:.1f} requests a second for {found['seconds']:g} s; "
        "p50 / p99."
    )
    yield ""
    made = [
        [f"{row['loop']}, {'beside one busy thread' if row['busy'] else 'quiet'}", f"{row['tokens_per_s']:.0f}"]
        + [" / ".join(f"{one:.1f}" for one in row[key]) for key in ("first_ms", "between_ms")]
        + [str(row["most_waiting"]), f"{row['without_token']} of {row['requests']}"]
        for row in found["rows"]
    ]
    head = ["", "tokens/s", "time to first token, ms", "between tokens, ms", "most waiting", "without a token"]
    yield from _table(head, made)


def _serve(found: Found) -> Iterator[str]:
    """A step is what one takes in ``hal run``: its clients by its tokens a second."""
    made = []
    for row in found["rows"]:
        run, engine, serve = row["run"], row["engine"], row["serve"]
        step = row["clients"] / run * 1e3
        made.append(
            [f"{row['shape']}, {row['clients']}", *(f"{one:.0f}" for one in (run, engine["rate"], serve["rate"]))]
            + [f"{serve['rate'] / engine['rate']:.3f}", f"{engine['rate'] / run:.3f}"]
            + [f"{one['first']:.1f}" for one in (engine, serve)]
            + [f"{one['gap']:.1f} / {one['gap_p99'] / step:.2f}" for one in (engine, serve)]
        )
    low, high = found["answers"]
    yield f"Prompts of {found['prompt']} tokens, {low} to {high} answered; tokens/s; first token p50, ms."
    yield ""
    head = ["model, clients", "hal run", "AsyncEngine", "hal serve", "serve / AsyncEngine", "AsyncEngine / run"]
    head += ["first, AsyncEngine", "first, serve", "gap, AsyncEngine: p50 ms / p99 steps", "gap, serve"]
    yield from _table(head, made)


PARTS = {
    "hooks": _hooks,
    "serve": _serve,
    "decode": _decode,
    "prefill": _prefill,
    "contexts": _contexts,
    "arrivals": _arrivals,
}
