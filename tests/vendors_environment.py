"""A fresh environment over the packages of this one, in which a vendor's plugin is installed by pip, offline."""

import os
import subprocess
import sysconfig
import venv

OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q")


def make(folder):
    """Make the environment in ``folder``/env; return its folder of packages."""
    venv.create(folder / "env", with_pip=False)
    (libraries,) = (folder / "env").glob("lib/python*/site-packages")
    (libraries / "here.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return libraries


def install(folder, *arguments):
    done = run(folder, "-m", "pip", "install", *OFFLINE, *map(str, arguments))
    assert done.returncode == 0, done.stderr


def run(folder, *arguments, cwd=None, **more):
    ours = ("PYTHONPATH", "HAL_DEVICE", "HAL_PLUGINS")
    variables = {key: value for key, value in os.environ.items() if key not in ours} | more
    python = str(folder / "env/bin/python")
    given = {"capture_output": True, "text": True, "timeout": 540, "check": False}
    return subprocess.run([python, *arguments], env=variables, cwd=cwd or folder, **given)


def hal(folder, *arguments, cwd=None, **more):
    return run(folder, "-c", "from hal.cli import main; main()", *arguments, cwd=cwd, **more)
