"""The wheels, the direction of imports, and words that must not be in the sources."""

import ast
import email
import io
import re
import subprocess
import sys
import tokenize
import zipfile
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core/src/hal_core"
HOST = ROOT / "hal"
ENGINE = ROOT / "engine/src/hal_engine"
RUNNER = ROOT / "runners/paddle/src/hal_paddle_runner"
DISTRIBUTIONS = {
    "paddle-hal": (ROOT, "hal"),
    "paddle-hal-engine": (ROOT / "engine", "hal_engine"),
    "paddle-hal-core": (ROOT / "core", "hal_core"),
    "paddle-hal-conformance": (ROOT / "conformance", "hal_conformance"),
    "paddle-hal-fastdeploy": (ROOT / "adapters/fastdeploy", "hal_fastdeploy"),
    "paddle-hal-vllm": (ROOT / "adapters/vllm", "hal_vllm"),
    "paddle-hal-paddle": (ROOT / "plugins/paddle", "hal_paddle"),
    "paddle-hal-torch-device": (ROOT / "plugins/torch_device", "hal_torch_device"),
}


class Wheel:
    """The content of a built wheel."""

    def __init__(self, path):
        with zipfile.ZipFile(path) as archive:
            self.files = {name: archive.read(name) for name in archive.namelist()}
        self.tops = {name.split("/")[0] for name in self.files}
        (self.info,) = [top for top in self.tops if top.endswith(".dist-info")]
        self.metadata = email.message_from_bytes(self.files[f"{self.info}/METADATA"])
        self.requires = [Requirement(line) for line in self.metadata.get_all("Requires-Dist", [])]

    def points(self, group):
        text = self.files.get(f"{self.info}/entry_points.txt", b"").decode()
        section = re.search(rf"(?ms)^\[{re.escape(group)}\]\n(.*?)(?=^\[|\Z)", text)
        return {} if section is None else dict(line.split(" = ", 1) for line in section[1].split("\n") if line)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels, built offline from the working tree with the backend that is installed."""
    folder, built = tmp_path_factory.mktemp("wheels"), {}
    for name, (source, _) in DISTRIBUTIONS.items():
        out = folder / name
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        (path,) = out.glob("*.whl")
        built[name] = Wheel(path)
    return built


@pytest.fixture(params=sorted(DISTRIBUTIONS))
def package(request, wheels):
    source, package = DISTRIBUTIONS[request.param]
    return wheels[request.param], package, source


def test_a_wheel_contains_its_packages_and_nothing_else(package):
    wheel, name, _ = package
    packages = {name} | ({RUNNER.name} if name == "hal_engine" else set())
    assert wheel.tops == {*packages, wheel.info}
    assert {f"{one}/py.typed" for one in packages} <= wheel.files.keys()
    tests = re.compile(r"(^|/)(tests?|test_[^/]*|conftest\.py|__pycache__)(/|$)")
    # The kit is test code that vendors run.
    assert not [file for file in wheel.files if tests.search(file) and name != "hal_conformance"]
    assert DISTRIBUTIONS[wheel.metadata["Name"]][1] == name


def test_a_wheel_contains_every_module_of_the_working_tree(package):
    wheel, name, source = package
    folder = source / "src" / name if (source / "src").exists() else source / name
    modules = {f"{name}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}
    if name == "hal_engine":
        modules |= {f"{RUNNER.name}/{path.relative_to(RUNNER).as_posix()}" for path in RUNNER.rglob("*.py")}
    assert modules <= set(wheel.files)
    stubs = {f"{name}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.pyi")}
    assert stubs <= set(wheel.files)
    assert bool(stubs) == (name == "hal_core")


def test_a_wheel_carries_the_license(package):
    wheel, _, source = package
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    (file,) = [file for file in wheel.files if file.startswith(f"{wheel.info}/licenses/")]
    assert wheel.files[file] == (source / "LICENSE").read_bytes()
    assert b"Apache License" in wheel.files[file]


def test_the_entry_points_are_there(wheels):
    assert wheels["paddle-hal"].points("console_scripts") == {"hal": "hal.cli:main"}
    assert wheels["paddle-hal"].points("hal.devices") == {}
    commands = {"devices", "doctor", "conform", "new-plugin", "new-runner"}
    assert wheels["paddle-hal"].points("hal.commands").keys() == commands
    assert wheels["paddle-hal-engine"].points("hal.commands").keys() == {"run", "serve", "tail"}
    assert wheels["paddle-hal-vllm"].points("hal.commands") == {"vllm": "hal_vllm.command"}
    assert wheels["paddle-hal-vllm"].points("vllm.general_plugins") == {"hal": "hal_vllm.plugin:register"}
    assert wheels["paddle-hal-engine"].points("hal.runners") == {"paddle": "hal_paddle_runner:RUNNER"}
    assert wheels["paddle-hal-core"].points("hal.devices") == {"cpu": "hal_core.devices.cpu:CpuPlugin"}
    assert wheels["paddle-hal-core"].points("hal.priorities") == {"cpu": "priority_0"}
    assert wheels["paddle-hal-core"].points("hal.conformance") == wheels["paddle-hal-core"].points("pytest11") == {}
    kit = wheels["paddle-hal-conformance"]
    assert kit.points("hal.conformance") == {"cpu": "hal_conformance.ranks.support:HostSupport"}
    assert kit.points("pytest11") == {"hal_conformance.plugin": "hal_conformance.plugin"}


def test_the_requirements_are_right(wheels):
    for wheel in wheels.values():
        assert wheel.metadata["Requires-Python"] == ">=3.11"
        hard = {item.name for item in wheel.requires if item.marker is None}
        assert "paddlepaddle" not in hard, "a hard dependency would lay the CPU build over a user's own build"
    for name in ("paddle-hal-engine", "paddle-hal-core"):
        cpu = {
            item.name: item.specifier
            for item in wheels[name].requires
            if item.marker and item.marker.evaluate({"extra": "cpu"})
        }
        assert {"paddlepaddle", "setuptools"} <= set(cpu)
        assert cpu["paddlepaddle"].contains("3.1.0")
        assert not cpu["paddlepaddle"].contains("3.4.0")
    host = {item.name: item for item in wheels["paddle-hal"].requires if item.marker is None}
    core_version = wheels["paddle-hal-core"].metadata["Version"]
    assert host["paddle-hal-core"].specifier.contains(core_version)
    assert {specifier.operator for specifier in host["paddle-hal-core"].specifier} == {">=", "<"}
    assert not [item for item in wheels["paddle-hal-core"].requires if item.name == "paddle-hal"]
    kit = wheels["paddle-hal-conformance"]
    assert next(item for item in kit.requires if item.name == "paddle-hal-core").specifier.contains(core_version)
    # hal's extras of the same names are the engine's
    host, engine = wheels["paddle-hal"], wheels["paddle-hal-engine"]
    for name in ("cpu", "serve", "ray", "fastdeploy"):
        (one,) = [item for item in host.requires if item.marker and item.marker.evaluate({"extra": name})]
        assert (one.name, one.extras) == ("paddle-hal-engine", {name})
        assert name in engine.metadata.get_all("Provides-Extra")
    extra = [item for item in wheels["paddle-hal-core"].requires if "conformance" in str(item.marker)]
    assert [item.name for item in extra] == ["paddle-hal-conformance"]


def test_what_is_imported_is_required(package):
    """A wheel whose metadata lacks a dependency works only on machines that have it by chance."""
    wheel, name, source = package
    folder = source / "src" / name if (source / "src").exists() else source / name
    ours = {
        "hal": "paddle-hal",
        "hal_engine": "paddle-hal-engine",
        "hal_core": "paddle-hal-core",
        "hal_conformance": "paddle-hal-conformance",
    }
    provided = ours | {"safetensors": "safetensors"}
    required = {item.name.lower().replace("_", "-") for item in wheel.requires}
    for path in [*sources(folder), *(sources(RUNNER) if name == "hal_engine" else ())]:
        for module, line, _ in imports(path):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top in (name, "paddle"):
                continue
            distribution = provided.get(top, top).lower().replace("_", "-")
            assert distribution in required, f"{path.relative_to(ROOT)}:{line} imports {module}"


# Directions of imports.


@cache
def sources(folder):
    return tuple(sorted(folder.rglob("*.py")))


@cache
def imports(path):
    """(module, line, whether at module level) of each absolute import; imports for type checkers do not count."""

    def visit(node, top):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno, top) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                yield (node.module, node.lineno, top)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child, top)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, top and not inside)

    return list(visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), True))


def test_the_core_imports_no_framework_at_module_level():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in sources(CORE)
        for module, line, top in imports(path)
        if top and re.match(r"(paddle|torch|cupy|cuda|tensorflow|jax)(\.|$)", module)
    ]
    assert wrong == []


# Device names. The rule: in hal and hal_core, outside comments and docstrings, no identifier and no string may contain
# the name of a device that is a plugin; and no value may be compared with a device's name, the embedded one's included.

DEVICES = ("cuda", "xpu", "maca", "metax", "opencl", "sim")
#: Names of protocols of other projects, which have a device's name in them.
PROTOCOLS = ("__cuda_array_interface__", "DLPACK_CUDA")
WORD = re.compile(rf"(?<![A-Za-z])({'|'.join(DEVICES)})(?![A-Za-z])", re.IGNORECASE)


def docstrings(module):
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno


def device_words(text):
    """(line, word) of each forbidden word in identifiers and strings."""
    if not WORD.search(text):  # the tokens of a file take long
        return
    prose = set(docstrings(ast.parse(text)))
    kinds = {tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in kinds or (token.type == tokenize.STRING and token.start[0] in prose):
            continue
        content = token.string
        for protocol in PROTOCOLS:
            content = content.replace(protocol, "")
        for match in WORD.finditer(content):
            yield token.start[0], match[0]


def compared_names(text):
    """Lines that compare something with a device's name, the embedded one included."""
    names = {*DEVICES, "cpu", "gpu"}
    if not any(name in text for name in names):
        return

    def strings(node):
        return {item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)}

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare | ast.MatchValue) and strings(node) & names:
            yield node.lineno


@pytest.mark.parametrize("check", [device_words, compared_names])
def test_nothing_in_host_or_core_branches_on_a_device_name(check):
    wrong = [
        f"{path.relative_to(ROOT)}: {found}"
        for folder in (HOST, ENGINE, RUNNER, CORE)
        for path in sources(folder)
        for found in check(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


# Hosts and absolute paths, in every file that is tracked.

# Written in two pieces, so that this file does not contain the searched text.
HOSTS = [
    "py" + "pi.org",
    "python" + "hosted.org",
    "anaconda" + ".org",
    "npm" + "js.org",
    "paddlepaddle" + ".org.cn/whl",
]
MACHINE_PATH = re.compile(r"(?<![\w.~$})-])/(?:home|root|work|Users|mnt|scratch|data)/\w|\b[A-Z]:\\\\?Users\b")


def tracked():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]


def lines_of_text(file):
    content = file.read_bytes()
    if b"\0" in content or len(content) > 1_000_000:  # weights, and a tokenizer's table of words
        return []
    return content.decode("utf-8", errors="replace").splitlines()


def test_no_file_names_a_package_registry_or_a_path_of_one_machine():
    wrong = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for file in tracked()
        for number, line in enumerate(lines_of_text(file), 1)
        if any(host in line for host in HOSTS) or MACHINE_PATH.search(line)
    ]
    assert wrong == []
