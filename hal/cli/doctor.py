"""``hal doctor``: this machine and every plugin, each in a process of its own with a deadline."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Annotated, Any

import typer

from hal.device_list import refused
from hal.discovery import ALLOW_LIST, Entry, installed
from hal.timeouts import TIMEOUTS

from .console import fitted, shown
from .doctor_child import PLUGIN, SELECTION
from .failures import check_seconds, one_line
from .opened import Ended, run_child

WRONG = ("broken", "mismatch", "duplicate", "not opened")
"""Statuses that are findings. A device that is unavailable is none: its chip or driver is not here."""


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    step: Annotated[
        bool, typer.Option("--step", help="Run one step of each hook on each device that can be used.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Print what an issue needs: no output of plugins, home folders or secrets."),
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="What the check of one plugin may take (default 30).")
    ] = None,
) -> None:
    """Check this machine and its plugins: usable devices, the one chosen, and each fault with its cure.

    The exit status is 0 without findings, 1 with findings.
    """
    from .doctor_machine import facts
    from .doctor_machine import findings as limits

    if timeout is not None:
        check_seconds(timeout)
    seconds = TIMEOUTS.plugin_check if timeout is None else timeout
    entries = installed()
    machine = facts()
    plugins = [_plugin(entry, entries, step, seconds) for entry in entries]
    if report:
        for plugin in plugins:
            plugin.pop("output", None)  # before the findings, which quote it
    chosen = _chosen(seconds)
    found = [*map(_finding, plugins), chosen.pop("finding", ""), *limits(machine)]
    result = {"machine": machine, **chosen, "plugins": plugins, "findings": [one for one in found if one]}
    if report:
        result = scrubbed(result)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print(fitted(shown("\n".join(lines(result)), sys.stdout), sys.stdout, every=True))
    if result["findings"]:
        raise SystemExit(1)


def _plugin(entry: Entry, entries: tuple[Entry, ...], step: bool, seconds: float) -> dict[str, Any]:
    """Check one plugin; what metadata alone refuses is not imported."""
    verdict = entry.verdict
    row: dict[str, Any] = {
        "name": entry.name,
        "distribution": f"{entry.distribution} {entry.version}",
        "contract": verdict.range,
        "priority": entry.priority,
    }
    if refusal := refused(entry, verdict, entries):
        return row | dict(zip(("status", "reason", "cure"), refusal, strict=True))
    ended = run_child("hal.cli.doctor_child", [PLUGIN, entry.name, "step" if step else ""], seconds)
    row |= ended.answer or {}
    stage = row.pop("stage", "its start")
    if stage or not ended.answer:
        row |= {"status": "broken", "reason": _how(stage, ended, seconds), "output": ended.output}
        row["cure"] = f"mend or update {entry.distribution}, or leave it out with {ALLOW_LIST}"
    elif ended.timed_out or ended.failed:
        row["exit"] = _how("its exit", ended, seconds)
    return row


def _how(stage: str, ended: Ended, seconds: float) -> str:
    late = f"{stage} did not end within {seconds:g} s"
    return late if ended.timed_out else f"the process {ended.how} in {stage}"


def _finding(row: dict[str, Any]) -> str:
    """Return a line about the plugin's fault, or ""."""
    name = row["name"]
    if row["status"] in WRONG:
        output = f"; its output: {row['output']}" if row.get("output") else ""
        return one_line(f"{name}: {row['status']}: {row['reason']} ({row['cure']}){output}")
    if row.get("exit"):
        cure = "a command would too: end threads in close(), and mend what the library does at exit"
        return f"{name}: {row['exit']} ({cure})"
    if row.get("step_error"):
        return f"{name}: one step failed: {row['step_error']}"
    if row.get("printed"):
        return f"{name}: it prints when it is imported or probed (have it log instead: output belongs to the command)"
    if row.get("locked", "").startswith("no:"):
        return (
            f"{name}: pinned_host is claimed, but {row['locked'][4:]} (leave it off, or lock what allocate_host gives)"
        )
    return ""


def _chosen(seconds: float) -> dict[str, Any]:
    ended = run_child("hal.cli.doctor_child", [SELECTION, "", ""], seconds)
    found = ended.answer or {}
    if found.pop("stage", "the choice of a device") or not ended.answer:
        found = {"selected": None, "why": _how("the choice of a device", ended, seconds), "passed_over": []}
    if found["selected"] is None:
        found["finding"] = f"no device is chosen without a name: {found['why']}"
    return found


def lines(report: dict[str, Any]) -> list[str]:
    """Return the report for a terminal."""
    machine = report["machine"]
    out = [f"{name.replace('_', ' ')}: {_word(name, value)}" for name, value in machine.items()]
    out += ["", f"chosen without a name: {report['selected'] or 'none'}: {report['why']}"]
    out += [f"  passed over: {one}" for one in report["passed_over"]]
    for row in report["plugins"]:
        out += ["", f"{row['name']}: {row['status']} ({row['distribution']}, contract {row['contract']})"]
        out += _details(row)
    found = report["findings"]
    return [
        *out,
        "",
        f"{len(found)} finding{'s' * (len(found) > 1)}:" if found else "no findings",
        *(f"  {one}" for one in found),
    ]


def _details(row: dict[str, Any]) -> list[str]:
    why = one_line(f"{row.get('reason', '')} " + (f"({row['cure']})" if row.get("cure") else ""))
    out = [f"  {why}"] if why else []
    if "import_seconds" in row:
        out.append(f"  imported in {row['import_seconds'] * 1000:.0f} ms")
    if opened := row.get("opened"):
        can = [name if value is True else f"{name}={value}" for name, value in opened["capabilities"].items() if value]
        out.append(f"  opened in {opened['seconds']:.2f} s: {', '.join(can) or 'no capabilities'}")
        out += [f"  {hook} falls back: {reason}" for hook, reason in opened["fallbacks"].items()]
        out += [f"  {opened['note']}"] if opened["note"] else []
        out.append(f"  locked host memory: {row['locked']}")
    if step := row.get("step"):
        out.append(f"  one step: {', '.join(f'{hook} {mode}' for hook, mode in step.items())}")
    return out


def _word(name: str, value: Any) -> str:  # noqa: ANN401 (a fact)
    if isinstance(value, dict):
        return ", ".join(f"{key}={one}" for key, one in value.items()) or "none set"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if name in ("shared_memory_free", "lockable_memory") and isinstance(value, int):
        return "unlimited" if value < 0 else f"{value / 2**20:.1f} MiB"
    return str(value) if value not in ("", None) else "unknown"


_NAME = r"[^/\s:;,'\")]"
_HOMES = re.compile(rf"/(?:home|Users)/{_NAME}+")
_SECRETS = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)


def scrubbed(value: Any) -> Any:  # noqa: ANN401 (any part of the report)
    """Return the report with home folders as "~", folders named as the user "USER", and secrets' values "***"."""
    if isinstance(value, dict):
        return {name: scrubbed(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [scrubbed(inner) for inner in value]
    if not isinstance(value, str):
        return value
    text = value
    for name, secret in os.environ.items():
        if _SECRETS.search(name) and len(secret) > 3:
            text = text.replace(secret, "***")
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(f"{re.escape(home)}(?!{_NAME})", "~", text)  # another user's name may begin with this one's
    text = _HOMES.sub("~", text)
    for user in {os.environ.get("USER", ""), os.environ.get("LOGNAME", "")} - {"", "root"}:
        text = re.sub(f"/{re.escape(user)}(?!{_NAME})", "/USER", text)  # of /disks/jane
    return text
