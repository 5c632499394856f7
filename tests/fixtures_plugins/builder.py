"""Pretend installations: a folder with dist-info and modules is all that importlib.metadata needs.

`Site.device(name, state=...)` installs one plugin whose code is `toy.py.txt` next to this file with one thing changed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from hal.discovery import Entry, installed

TOY = (Path(__file__).parent / "toy.py.txt").read_text(encoding="utf-8")
RANGE = "paddle-hal-core>=1.0,<2"
#: Modules that are imported before site-packages leaves the path.
PREPARED = (
    "packaging.requirements",
    "stevedore.driver",
    "rich.table",
    "rich.console",
    "hal.device_list",
    "hal.opening",
    "hal.cli.devices",
    "hal.cli.versions",
    "hal_core.runtime.bound",
)
_numbers = itertools.count()

#: A device that starts a helper, writes its process id to a file, and never returns.
HANG = """import os, pathlib, subprocess
        helper = subprocess.Popen(["sleep", "600"])
        pathlib.Path(os.environ["HAL_TEST_MARK"]).write_text(str(helper.pid))
        helper.wait()"""

#: Differences from a valid, available plugin: text of toy.py.txt, and its replacement.
STATES: dict[str, tuple[str, str]] = {
    "available": ("", ""),
    "unavailable": ("return Probe.yes()", 'return Probe.no("no chip", "plug one in")'),
    "absent": ("return Probe.yes()", 'return Probe.absent("no such chip", "use another machine")'),
    "unavailable_raised": ("return Probe.yes()", 'raise Unavailable("no driver", cure="install the driver")'),
    "unavailable_at_open": ("return Device(index, options)", 'raise Unavailable("chip is busy", cure="free it")'),
    "broken_import": ("# import", "import a_module_that_nobody_has"),
    "syntax_error": ("# import", "def broken("),
    "exits": ("# import", "raise SystemExit(3)"),
    "exits_at_once": ("# import", "import os; os._exit(3)"),
    "import_hangs": ("# import", "import threading; threading.Event().wait()"),
    "import_slow": ("# import", "import a_latch; a_latch.wait()"),
    "probe_slow": ("return Probe.yes()", "import a_latch; a_latch.wait(); return Probe.yes()"),
    "asserts": ("# import", "assert False, 'half built'"),
    "prints": ("# import", "print('noise of a plugin')"),
    "no_class": ("# end", "ToyPlugin = object()"),
    "abstract": ("def open(", "def open_it("),
    "no_base": ("class ToyPlugin(Plugin)", "class ToyPlugin"),
    "other_name": ("name = NAME", "name = 'somebody_else'"),
    "probe_crashes": ("return Probe.yes()", "raise OSError('probe fell over')"),
    "probe_exits": ("return Probe.yes()", "raise SystemExit(4)"),
    "probe_odd": ("return Probe.yes()", "return True"),
    "open_crashes": ("return Device(index, options)", "raise OSError('driver said no')"),
    "notes": ("OPENED.append(self)", "self.note = 'path: Python (as it was asked for)'; OPENED.append(self)"),
    "open_hangs": ("return Device(index, options)", HANG),
    "open_dies": ("return Device(index, options)", "import os; os.kill(os.getpid(), 11)"),
    "no_capabilities": ("self.capabilities = ", "self.something = "),
    "wrong_signature": (
        "def insert_tasks(self, device, state, tasks, stream)",
        "def insert_tasks(self, device, state)",
    ),
    "no_name": ("self.name, self.index", "self.nom, self.index"),
    "another_devices_name": (
        "self.name, self.index, self.options, self.closed = NAME",
        "self.name, self.index, self.options, self.closed = 'cpu'",
    ),
    "missing_hook": ("def insert_tasks(self,", "def insert_nothing(self,"),
    "exit_crashes": ("# import", "import atexit, os; atexit.register(os.kill, os.getpid(), 11)"),
    "close_crashes": ("self.closed += 1", "raise OSError('close fell over')"),
}


class Site:
    """A folder that counts as site-packages, with the distributions installed into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def activate(self, patch) -> Site:
        """Make this the only place where distributions are installed; imports of our own packages still work."""
        for module in PREPARED:
            import_module(module)  # before site-packages goes
        rest = [entry for entry in sys.path if "site-packages" not in entry]
        patch.setattr(sys, "path", [str(self.folder), *rest])
        patch.delenv("HAL_DEVICE", raising=False)
        patch.delenv("HAL_PLUGINS", raising=False)
        return self

    def distribution(
        self,
        name: str,
        *,
        version: str = "1.0",
        points: Mapping[str, Mapping[str, str]] | str,
        requires: Sequence[str] = (RANGE,),
    ) -> Path:
        """Write the metadata of one distribution; ``points`` maps group to name to value, or is the raw text."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if not isinstance(points, str):
            sections = [
                f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())
                for group, values in points.items()
            ]
            points = "\n".join(sections)
        (info / "entry_points.txt").write_text(points, encoding="utf-8")
        return info

    def core(self, version: str = "1.0.0", *, device: bool = False, state: str = "available") -> None:
        """A stand-in for paddle-hal-core, with the embedded device when asked."""
        if device:
            self.device(
                "cpu", state=state, distribution="paddle-hal-core", version=version, requires=("numpy",), priority=0
            )
        else:
            self.distribution("paddle-hal-core", version=version, points="", requires=())

    def device(
        self,
        name: str,
        *,
        state: str = "available",
        distribution: str | None = None,
        version: str = "1.0",
        requires: Sequence[str] = (RANGE,),
        priority: int | str | None = 10,
    ) -> str:
        """Install a plugin with one device. ``priority``: as the metadata declares it (None: no line).

        Returns the name of its module, which only this plugin imports.
        """
        distribution = distribution or f"paddle-hal-{name}"
        module = self.module(name, state)
        self.modules[distribution] = module
        points = {"hal.devices": {name: f"{module}:ToyPlugin"}}
        if priority is not None:
            points["hal.priorities"] = {name: priority if isinstance(priority, str) else f"priority_{priority}"}
        self.distribution(distribution, version=version, points=points, requires=requires)
        return module

    def module(self, name: str, state: str = "available") -> str:
        """Write the code of a plugin into a module with a fresh name."""
        module = f"hal_fixture_{next(_numbers)}_{name}"
        old, new = STATES[state]
        assert old in TOY, f"toy.py.txt has no {old!r}"
        source = TOY.replace(old, new) if old else TOY
        source = source.replace("NAME", repr(name))
        (self.folder / f"{module}.py").write_text(source, encoding="utf-8")
        return module

    def imported(self) -> set[str]:
        """The distributions whose code was imported, with or without success."""
        marks = {path.name for path in self.folder.glob("*.imported")}
        return {dist for dist, module in self.modules.items() if f"{module}.imported" in marks}


def only(name: str) -> Entry:
    """The one installed device of a name."""
    (entry,) = [entry for entry in installed() if entry.name == name]
    return entry
