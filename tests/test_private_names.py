"""Private names of other libraries, which a new version may drop: only those of one list, and none of `typing`.

Found is a name with an underscore that is imported, read or set as an attribute, or given to ``getattr``: if the file
imports its library, or if no file of this repository defines it. Of `typing` also what has two underscores, as
``Annotated.__class_getitem__``, which is missing from Python 3.13.
"""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "hal",
    "engine",
    "adapters",
    "core",
    "conformance",
    "plugins",
    "runners",
    "examples",
    "tools",
    "benchmarks",
    "tests",
)
OURS = {"hal", "tests"} | {
    path.parent.name for pattern in ("*/src", "*/*/src", "examples/*") for path in ROOT.glob(f"{pattern}/*/__init__.py")
}
ASKING = ("getattr", "setattr", "hasattr", "delattr")
DOCUMENTED = {"os._exit", "sys._getframe", "sys._current_frames", "_handle"}
"""Public in spite of their names; the last is of ``ctypes.CDLL``."""
TAKEN = {
    "_C_ops": "paddle: a kernel without the checks of its public function, in each step; and an allocation that waits "
    "for no stream",
    "_get_all_register_op_kernels": "paddle: which kernels a build has, without running one that would end the process",
    "_new_process_group_impl": "paddle: no public function takes the store of a group, or one of some ranks alone",
    "_current_expected_place": "paddle: the place as an object, which get_device() gives as a text",
    "_get_current_custom_device_stream": "paddle: custom devices have no other stream of theirs",
    "_set_current_custom_device_stream": "paddle: as above",
    "_is_initialized": "paddle: a tensor whose memory was freed; asked for before it is used",
    "_copy_to": "paddle: a copy that does not wait, in the tests of its hazards",
    "_share_data_with": "paddle: a test gives a tensor other memory",
    "_clear_data": "paddle: a test frees a tensor's memory",
    "_bad_words_token_ids": "vllm: bad words as tokens, which its public method makes of texts with a tokenizer",
    "torch.ops.aten._flash_attention_forward": "torch: packed sequences; the public function takes padded ones",
    "torch.cuda._sleep": "torch: a check keeps a stream busy",
    "_neg_view": "torch: a test makes a lazy tensor",
    "_efficientzerotensor": "torch: as above",
    "typer._click": "typer: types of its own signatures, for mypy alone",
    "stevedore._cache": "stevedore: a test makes its cache stale",
    "asyncio.Handle._run": "asyncio: a benchmark times each callback",
    "_option_string_actions": "argparse: the options that a mistyped one may have meant",
    "_close_pipe_fds": "subprocess: tests fork a warm process in place of starting one",
    "_obj": "ctypes: a test's function writes where a pointer leads",
    "_cached_launch_token_num": "FastDeploy: a count of its runner, which inserting requests changes",
    "_cached_real_bsz": "FastDeploy: as above",
}
"""Each with its library and the reason."""


def is_private(name):
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__")


def imported(tree):
    """Return what the names of imports stand for, but for our own modules'."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            pairs = [
                (one.asname or one.name.split(".")[0], one.name if one.asname else one.name.split(".")[0])
                for one in node.names
            ]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            pairs = [(one.asname or one.name, f"{node.module}.{one.name}") for one in node.names]
        else:
            continue
        found |= {name: what for name, what in pairs if what.partition(".")[0] not in OURS}
    return found


def defined(tree):
    """Give the names that a file defines: functions, classes, variables, parameters, and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            yield node.attr


def used(tree):
    """Give line and private name for each use; with its library where the file imports that."""
    libraries = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] not in OURS:
            module = node.module if any(map(is_private, node.module.split("."))) else ""
            private = [module] if module else [one.name for one in node.names if is_private(one.name)]
            yield from ((node.lineno, name) for name in private)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, one.name) for one in node.names if any(map(is_private, one.name.split("."))))
        elif isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node.value).partition(".")
            of = libraries.get(root, "")
            if of.partition(".")[0] == "typing" and node.attr.startswith("_"):
                yield node.lineno, f"{of}.{node.attr}"
            elif is_private(node.attr):
                named = ast.unparse(node.value).replace(".", "").replace("_", "").isalnum()
                yield node.lineno, ".".join(filter(None, (of, rest, node.attr))) if of and named else node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ASKING and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
                yield node.lineno, name.value


def foreign(sources):
    """Return the places of each private name, in texts by path, that is another library's."""
    found, own = defaultdict(list), set()
    for path, text in sources.items():
        tree = ast.parse(text)
        own |= set(defined(tree))
        for line, name in used(tree):
            found[name].append(f"{path}:{line}")
    return {name: places for name, places in found.items() if name not in own | DOCUMENTED}


def listed(name):
    """Return the entry of the list that has a name: a whole one, a module's, or the last part alone."""
    words = name.split(".")
    wholes = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next((one for one in (*wholes, *words) if one in TAKEN), None)


@pytest.fixture(scope="module")
def found():
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return foreign({path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths})


def test_private_names_of_other_libraries_are_those_of_the_list(found):
    assert {name: places for name, places in found.items() if listed(name) is None} == {}


def test_each_of_the_list_is_still_used(found):
    assert {listed(name) for name in found} == TAKEN.keys()
    assert not [name for name in TAKEN if name.startswith("typing")]
