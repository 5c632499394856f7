"""A full disk under the ipc folder: an error that names the cure, and no files left behind."""

import shutil
import subprocess
import sys
import textwrap

import pytest

CODE = """
    import os, subprocess, sys
    from hal_engine.reading import OutputReader
    from hal_engine.transport import private_ipc_url
    from hal_core.errors import InvalidValue, Unavailable

    folder = sys.argv[1]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=6", "tmpfs", folder], check=True)
    os.environ["XDG_RUNTIME_DIR"] = folder
    url = private_ipc_url()
    for name in range(9):
        try:
            open(f"{folder}/{name}", "w").close()
        except OSError:
            break
    try:
        OutputReader(url)
    except InvalidValue as error:
        print(error)
    try:
        private_ipc_url()
    except Unavailable as error:
        print(error)
    assert os.listdir(os.path.dirname(url.removeprefix("ipc://"))) == ["paddle-hal.lock"]
    for name in (0, 1):  # a reader makes two files: its socket and its lock
        os.remove(f"{folder}/{name}")
    with OutputReader(url):
        print("fine")
"""


def test_g26_a_full_disk_for_the_ipc_folder_is_named_with_its_cure(tmp_path):
    """On a small file system in a separate mount namespace."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("no mount namespace may be made here")
    arguments = ["unshare", "-m", sys.executable, "-c", textwrap.dedent(CODE), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    if "CalledProcessError" in done.stderr:
        pytest.skip("nothing may be mounted here")
    assert done.returncode == 0, done.stderr
    bind, folder, fine = done.stdout.splitlines()
    assert "cannot bind" in bind
    assert "No space left" in bind
    assert "No space left" in folder
    assert "make room there" in folder
    assert fine == "fine"
