"""The pages as a site, with search: ``make site`` writes ``build/pages/site``.

Every page of the repository is staged at its own path, so that links between pages hold; a link to a file or a folder
that is no page becomes its text. What is made from the code comes in ``reference/``: commands, variables, errors,
metrics, exit statuses. A page that no line of the navigation names is added to it, under what it belongs to. Strict: a
link that leads nowhere ends the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAGE = ROOT / "build" / "pages"
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```$)", re.S | re.M)
OTHERS = (
    ("Decisions", "docs/decisions/"),
    ("Evidence", "docs/evidence/"),
    ("Distributions", ""),
)
"""Further parts of the navigation: the pages below a folder, and at last all others."""


def pages() -> list[str]:
    """Paths of all pages of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if path and not path.startswith(".github")]


def staged(path: str) -> str:
    """Path of a page in the site."""
    return "index.md" if path == "README.md" else path


def rewritten(path: str, text: str, known: set[str]) -> str:
    """A page's text with links that the site has. Raises SystemExit, naming the page, for one that leads nowhere."""

    def link(found: re.Match[str]) -> str:
        shown, target = found[1], found[2]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        place, mark, anchor = target.partition("#")
        full = os.path.normpath(os.path.join(os.path.dirname(path), place))
        for page in (full, f"{full}/README.md"):
            if page in known:
                return f"[{shown}]({os.path.relpath(staged(page), os.path.dirname(staged(path)) or '.')}{mark}{anchor})"
        if not (ROOT / full).exists():
            raise SystemExit(f"{path}: the link to {target} leads nowhere")
        return shown

    parts = CODE.split(text)
    return "".join(part if number % 2 else LINK.sub(link, part) for number, part in enumerate(parts))


def references() -> Iterator[tuple[str, str]]:
    """Pages that are made from the code: name and text."""
    import hal_core.errors
    from hal_engine.serving.metrics import Metrics

    from hal.cli.tree import COMMANDS

    texts = []
    for name, about in COMMANDS.items():
        shown = "--help-all" if name == "run" else "--help"
        environment = {**os.environ, "COLUMNS": "76"}
        command = [sys.executable, "-m", "hal", name, shown]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
        texts.append(f"## hal {name}\n\n{about.capitalize()}.\n\n```text\n{done.stdout.rstrip()}\n```\n")
    yield "commands", "# Commands\n\n" + "\n".join(texts)
    yield "variables", variables()
    lines = ["# Errors\n\nEach has `what`, `cure`, and where it arose: `device`, `hook`, `argument`.\n"]
    for name in sorted(vars(hal_core.errors)):
        kind = getattr(hal_core.errors, name)
        if isinstance(kind, type) and issubclass(kind, hal_core.HalError):
            lines.append(f"## {name}\n\n{' '.join((kind.__doc__ or '').split())}\n")
    yield "errors", "\n".join(lines)
    rows = re.findall(r"^# HELP (\S+) (.*)\n# TYPE \S+ (\S+)$", Metrics("MODEL").text().decode(), re.M)
    table = "\n".join(f"| `{name}` | {kind} | {about} |" for name, about, kind in rows)
    yield (
        "metrics",
        f"# Metrics\n\nOf `GET /metrics` of `hal serve`.\n\n| name | kind | what it counts |\n|---|---|---|\n{table}\n",
    )
    yield "exit", EXIT


def variables() -> str:
    """The page of environment variables, with those of `hal serve`'s options."""
    from hal_conformance.report.report import PROFILE
    from hal_engine.children import API_KEY
    from hal_engine.cli.parameters import described, variable_of
    from hal_engine.cli.serve import VARIABLES
    from hal_engine.cli.server_options import Server
    from hal_engine.options import CHECK_RANKS, EngineOptions

    from hal.cli.logs import VARIABLE as LOG
    from hal.discovery import ALLOW_LIST, OBSERVED
    from hal.selection import ENVIRONMENT

    rows = {
        ENVIRONMENT: "the device, where no option names it",
        ALLOW_LIST: "the devices that hal may open, separated by commas",
        OBSERVED: "observers that see every hook call, separated by commas",
        LOG: "DEBUG, INFO, WARNING or ERROR: the lowest level that is printed",
        API_KEY: "the key that clients of `hal serve` send",
        CHECK_RANKS: "1: ranks compare their states after each step",
        PROFILE: "quick, default or nightly: the profile of the kit under pytest",
        f"{VARIABLES}CONFIG": "`hal serve --config`",
    }
    options = {**described(Server), **described(EngineOptions)}
    for name, (_, meta) in options.items():
        about = " ".join((meta.description or "").replace("|", "or").split())
        rows.setdefault(variable_of(name, meta, VARIABLES), f"`hal serve --{name.replace('_', '-')}`: {about}")
    table = "\n".join(f"| `{name}` | {about} |" for name, about in rows.items())
    timeouts = "Those of timeouts are [a page of their own](../docs/timeouts.md); a plugin's are in its README."
    return f"# Environment variables\n\n{timeouts}\n\n| variable | what it sets |\n|---|---|\n{table}\n"


EXIT = """# Exit statuses

| status | command | what it says |
|---|---|---|
| 0 | all | everything was done |
| 1 | `hal run` | ranks were lost |
| 1 | `hal conform` | the device does not conform |
| 2 | all | what was asked cannot be done: an option, a package, a file, a device |
| 2 | `hal run` | a request ended with an error |
| 128 + n | all | signal n ended the command: 130 after Ctrl-C, 143 after SIGTERM |
"""


def navigation(config: str, names: list[str]) -> str:
    """The configuration with the pages that its navigation does not name."""
    left = [name for name in names if f'"{name}"' not in config]
    added = []
    for title, folder in OTHERS:
        own = sorted(name for name in left if name.startswith(folder))
        left = [name for name in left if name not in own]
        rows = "".join(f'      {{ "{heading(name)}" = "{name}" }},\n' for name in own)
        added.append(f'    {{ "{title}" = [\n{rows}    ] }},\n')
    return config.replace("    # the rest\n", "".join(added), 1)


def heading(name: str) -> str:
    """A page's first heading."""
    found = re.search(r"^# (.+)$", (STAGE / "pages" / name).read_text(encoding="utf-8"), re.M)
    return (found[1] if found else name).replace("`", "").replace('"', "'")


def main() -> int:
    """Stage and build."""
    shutil.rmtree(STAGE, ignore_errors=True)
    known = {*pages()}
    texts = {staged(path): rewritten(path, (ROOT / path).read_text(encoding="utf-8"), known) for path in known}
    texts |= {f"reference/{name}.md": text for name, text in references()}
    for name, text in texts.items():
        file = STAGE / "pages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for picture in (ROOT / "docs").rglob("*.svg"):
        target = STAGE / "pages" / picture.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, target)
    config = (ROOT / "tools" / "site" / "zensical.toml").read_text(encoding="utf-8")
    (STAGE / "zensical.toml").write_text(navigation(config, sorted(texts)), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    status = subprocess.run(command, cwd=STAGE, check=False).returncode
    if not status:
        print(f"{(STAGE / 'site' / 'index.html').relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
