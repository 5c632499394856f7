"""The report as text, JSON and HTML."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from typing import Any
from xml.etree import ElementTree

from .outcomes import EXPECTED, NOT_CHOSEN, NOT_RUN, PASSED, SKIPPED, Report, clipped

JUNIT = {SKIPPED: ("skipped", "skipped"), EXPECTED: ("skipped", "skipped"), NOT_RUN: ("error", "errors")}
"""Outcomes of a test, and what they are in JUnit's words; others are failures."""
MARKS = {"checked": "ok", "in part": "in part", "skipped": "--", "failed": "FAILED"}
MARKS |= {"expected failure": "xfail", NOT_RUN: NOT_RUN}


def lines(report: Report) -> Iterator[str]:
    """Yield the report for a terminal: a line for each chosen guarantee, then failures, then errors of the lists."""
    header = report.header
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    yield f"hal conformance: {header.get('device', 'no device opened')} ({header.get('origin', '')})"
    yield f"  kit {header['kit']}; {header['date']}, {header['seconds']:g} s; {header['system']}; {header['processor']}"
    runtime = ", ".join(f"{name} {version}" for name, version in header.get("runtime", {}).items())
    yield f"  {versions}; driver and runtime: {runtime or 'not given (Support.versions)'}"
    if "capabilities" in header:
        has = [name if value is True else f"{name}={value}" for name, value in header["capabilities"].items() if value]
        yield f"  capabilities: {', '.join(has) or 'none'}"
        effort, fallbacks = header["effort"], header["fallbacks"]
        count = f", {effort['examples']} examples" if effort["examples"] else ""
        limit = f", a case hangs after {header['limit']:g} s without progress (--hang)" if "limit" in header else ""
        yield f"  profile {effort['profile']}{count}, seed {effort['seed']}, policy {header['policy']}{limit}"
        yield from (f"  falls back, {hook}: {reason}" for hook, reason in fallbacks.items())
    chosen = [entry for entry in report.guarantees if entry["note"] != NOT_CHOSEN]
    for entry in chosen:
        if report.stopped and entry["status"] != "failed":
            continue
        tests = f"{len(entry['tests'])} tests" if entry["tests"] else ""
        note = f"  [{entry['note']}]" if entry["note"] else ""
        yield f"  {entry['guarantee']:<4} {MARKS[standing(entry)]:<7} {entry['gist']}  {tests}{note}"
        yield from (f"       {claim}" for claim in entry["claims"])
    for name, test, others in failures(report):
        yield ""
        yield f"{name} {test['test']}: {test['kind']}"
        yield from (f"    {clipped(line)}" for line in test["error"].splitlines())
        yield f"    reproduce: {test['reproduce']}"
        if others:
            yield f"    with the same cause, {counted(others)}"
    yield from (f"  ERROR {problem}" for problem in report.problems)
    if header.get("skips"):
        yield f"  skipped: {', '.join(f'{count} {reason}' for reason, count in header['skips'].items())}"
    counts = [standing(entry) for entry in report.guarantees]
    summary = ", ".join(f"{counts.count(each)} {each}" for each in (*MARKS, NOT_CHOSEN) if each in counts)
    yield from [f"  stopped: {report.stopped}"] if report.stopped else []
    yield f"  {f'{report.unfinished}: {summary}' if report.unfinished else summary}: {verdict(report)}"


def standing(entry: dict[str, Any]) -> str:
    """Return the status of a guarantee in the words of all reports and of docs/support.md: "in part" if some of its
    tests were left out, which its note names, and :data:`NOT_CHOSEN` for one outside ``--only``."""
    if entry["note"] == NOT_CHOSEN:
        return NOT_CHOSEN
    return "in part" if entry["status"] == "checked" and entry["note"] else str(entry["status"])


def wrapped(line: str, columns: int) -> str:
    """Return a line of :func:`lines` for a terminal, wrapped between words; commands, which are copied, stay whole."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    if len(line) <= columns or line.lstrip().startswith("reproduce:"):
        return line
    return textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def verdict(report: Report) -> str:
    """Return the verdict of the run, in words."""
    if report.ok is None:
        return "no verdict"
    if not report.ok:
        return "does not conform"
    checked = [entry for entry in report.guarantees if entry["status"] not in ("skipped", NOT_RUN)]
    but = [entry["guarantee"] for entry in checked if entry["claims"]]
    conforms = f"conforms, but for {', '.join(but)}" if but else "conforms as far as checked"
    return conforms if checked else "no chosen test applies to this device"


def failures(report: Report) -> list[tuple[str, dict[str, Any], list[tuple[str, str]]]]:
    """Return the failures, one for each cause: guarantee, the first test, and guarantee and name of the other tests."""
    found: dict[str, tuple[str, dict[str, Any], list[tuple[str, str]]]] = {}
    failed = [(entry["guarantee"], test) for entry in report.guarantees for test in entry["tests"]]
    failed = [(name, test) for name, test in failed if test["outcome"] == "failed"]
    for name, test in sorted(failed, key=lambda one: bool(one[1]["same_as"])):  # the first failure leads
        leader = test["same_as"] or test["test"]
        if leader in found:
            found[leader][2].append((name, test["test"]))
        else:
            found[leader] = (name, test, [])
    return list(found.values())


def counted(others: list[tuple[str, str]]) -> str:
    """Return the other tests of a cause, each function once with its number of failed cases."""
    names = Counter((name, test.partition("[")[0]) for name, test in others)
    listed = ", ".join(f"{name} {test}" + (f" ({n} cases)" if n > 1 else "") for (name, test), n in names.items())
    return f"{len(others)} more: {listed}"


def render(report: Report, name: str) -> str:
    """Return the report as a document, by the end of its file's name: HTML, XML for JUnit's readers, else JSON."""
    if name.endswith((".html", ".htm")):
        return _html(report)
    if name.endswith(".xml"):
        return _junit(report)
    found = {"ok": report.ok, "verdict": verdict(report), **asdict(report)}
    return json.dumps(found, indent=2, default=str)


def _junit(report: Report) -> str:
    """One case for each test, and one for each problem of the whole run; what was not run is an error."""
    suite = ElementTree.Element("testsuite", name="hal conformance", timestamp=report.header["date"])
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in {**report.header, "verdict": verdict(report)}.items():
        ElementTree.SubElement(properties, "property", name=name, value=_printable(value))
    tests = [(entry["guarantee"], test) for entry in report.guarantees for test in entry["tests"]]
    tests += [("", {"test": "the run", "outcome": "failed", "error": problem}) for problem in report.problems]
    counts: Counter[str] = Counter(tests=len(tests), failures=0, errors=0, skipped=0)
    for name, test in tests:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=_printable(test["test"]))
        case.set("time", f"{test.get('seconds', 0.0):.3f}")
        if test["outcome"] == PASSED:
            continue
        kind, count = JUNIT.get(test["outcome"], ("failure", "failures"))
        counts[count] += 1
        error = _printable(test.get("error") or "")
        message = test.get("reason") or error.partition("\n")[0] or test["outcome"]
        ElementTree.SubElement(case, kind, message=_printable(message)).text = error
    for count, number in counts.items():
        suite.set(count, str(number))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _printable(value: object) -> str:
    """Return a text without characters that XML has not."""
    return re.sub("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", str(value))


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #222; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .3rem .6rem; text-align: left; vertical-align: top;
border-bottom: 1px solid #ddd; } .checked { color: #176b2c; } .failed { color: #b00020; font-weight: 600; }
.skipped { color: #777; } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; white-space: pre-wrap; }
"""


def _html(report: Report) -> str:
    rows = []
    for entry in report.guarantees:
        kind = entry["status"].split()[0]
        note = "; ".join(filter(None, [entry["note"], *entry["claims"]]))
        cells = (entry["guarantee"], entry["hook"], entry["gist"], standing(entry), note)
        rows.append(f'<tr class="{kind}">' + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    sections = []
    for name, test, others in failures(report):
        body = f"{test['error']}\n\nreproduce: {test['reproduce']}"
        body += f"\nwith the same cause, {counted(others)}" if others else ""
        sections.append(f"<h3>{name} {escape(test['test'])}</h3><pre>{escape(body)}</pre>")
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in report.problems)
    header = escape(json.dumps(report.header, indent=2, default=str))
    summary = escape(f"{report.unfinished} {verdict(report)}".strip().capitalize())
    title = escape(f"hal conformance: {report.header.get('device', '')}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><p>{summary}.</p>"
        f"<table><tr><th>guarantee<th>hook<th>what<th>status<th>note</tr>{''.join(rows)}</table>"
        f"<ul>{problems}</ul>{''.join(sections)}<details><summary>run</summary><pre>{header}</pre></details></html>"
    )
