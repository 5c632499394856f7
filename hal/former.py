"""Names of release 1.1 for what is :mod:`hal_engine`'s now: ``hal.stepping`` is ``hal_engine.stepping``, and so on; and
for what is :mod:`hal_paddle_runner`'s.

They work in this release, with a DeprecationWarning, and go with the next one.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False  # saves the import of typing, as in hal/__init__.py
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

MOVED = {
    *("children", "distributed", "engine", "generation", "handover", "mkl", "model", "object_loader", "proposers"),
    *("reading", "sampling", "serving", "spelling", "stepping", "transport", "worker"),
}
"""Modules and packages that were in hal."""
RUNNER = "hal_paddle_runner"
_RUNNERS = {
    "worker": RUNNER,
    **{f"model.{name}": f"{RUNNER}.{name}" for name in ("batch", "kv_cache", "llama", "operators", "weights")},
    **{f"model.{name}": f"{RUNNER}.{name}" for name in ("prediction", "prediction_host")},
    "proposers.mtp": f"{RUNNER}.mtp",
    "handover.cache": f"{RUNNER}.blocks",
    "distributed.tensor_ranks": f"{RUNNER}.ranks",
}
"""Those of them that are the Paddle runner's, and their names of today."""


def today(name: str) -> str:
    """Return the name of today of a module that was in hal."""
    former = name.partition(".")[2]
    for begin, found in _RUNNERS.items():
        if former == begin or former.startswith(f"{begin}."):
            return found + former.removeprefix(begin)
    return f"hal_engine.{former}"


class _Moved:
    """Finder and loader of the former names: each is the same module object as the new one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a former name alone."""
        first, _, rest = name.partition(".")
        if first != "hal" or rest.partition(".")[0] not in MOVED:
            return None
        return ModuleSpec(name, self)  # type: ignore[arg-type]  # a Loader by its methods; importlib.abc imports typing

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module by its name of today."""
        import warnings

        now = today(spec.name)
        try:
            module = import_module(now)
        except ModuleNotFoundError as error:
            if error.name not in ("hal_engine", RUNNER):
                raise
            from hal import engine_missing

            raise ImportError(str(engine_missing(spec.name))) from None
        warnings.warn(f"{spec.name} is {now} now; the former name goes with the next release", DeprecationWarning, 2)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which was executed under its name of today, the spec of that name back."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Have former names found, before the folders that a checkout of release 1.1 leaves behind (``__pycache__``)."""
    sys.meta_path.insert(0, _Moved())
