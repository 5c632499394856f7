"""The names in a function's source, and the refusal of a function that does what hal does not know."""

import re
from pathlib import Path

import pytest
from hal_core import Unavailable
from hal_fastdeploy.reading import names_of

from . import functions

OF, function_from, source_of = functions.OF, functions.function_from, functions.source_of
ANONYMOUS = lambda self, req_dicts: None  # noqa: E731
PAGE = (Path(__file__).parents[3] / "docs/fastdeploy.md").read_text(encoding="utf-8")

READ = {
    # a line: the names in it
    'self.share_inputs["a"] = 1': {"share_inputs.a"},
    'self.share_inputs["a"][0:1, :] += 1': {"share_inputs.a"},
    "self.model_inputs.a = 1": {"model_inputs.a"},
    'self.model_inputs["a"][0][1:2] = np.zeros(1)': {"model_inputs.a", "np.zeros()"},
    'async_set_value(self.share_inputs["a"][0:1], 1)': {"share_inputs.a", "async_set_value()"},
    'fill(out=self.share_inputs["a"])': {"share_inputs.a", "fill()"},
    'self.share_inputs["a"].fill_(0)': {"share_inputs.a"},
    'self.share_inputs["a"][0].append(1)': {"share_inputs.a"},
    'self.share_inputs["a"][0], self.b = 1, 2': {"share_inputs.a", "self.b"},
    'del self.share_inputs["a"]': {"share_inputs.a"},
    'self.share_inputs.update({"a": 1})': {"share_inputs.update()"},
    'inputs = self.share_inputs; inputs["a"] = 1': {"share_inputs.a"},
    'inputs, n = self.share_inputs, 1; inputs["a"][n] = 1': {"self.share_inputs", "share_inputs.a"},
    'part = self.share_inputs["a"][0:1]; part[:] = 1': {"share_inputs.a"},
    'held = self; held.share_inputs["a"] = 1': {"share_inputs.a"},
    '(part := self.share_inputs["a"])[0] = 1': {"share_inputs.a"},
    'part = self.share_inputs["a"] or None; part[0] = 1': {"share_inputs.a"},
    'for part in (self.share_inputs["a"], self.share_inputs["b"]): part[0] = 1': {"share_inputs.a", "share_inputs.b"},
    'for name in ("a", "b"): self.share_inputs[name] = 1': {"share_inputs.[name]"},
    'getattr(self, "share_inputs")["a"] = 1': {"share_inputs.a"},
    'setattr(self, "a", 1)': {"setattr()", "self"},
    'with self.lock: self.share_inputs["a"] = 1': {"share_inputs.a"},
    "self.flag = True": {"self.flag"},
    "self.count += 1": {"self.count"},
    "self.kept[req_dicts[0].request_id] = 1": {"self.kept"},
    "self.proposer.flag = True": {"self.proposer.flag"},
    "for self.last in req_dicts: pass": {"self.last"},
    "self.sampler.apply(1)": {"self.sampler.apply()"},
    "controller = self.controller; controller.swap(req_dicts)": {"self.controller.swap()"},
    "self.kept.pop(1, None)": {"self.kept.pop()"},
    "tell = self.listener.notify; tell(1)": {"self.listener.notify()"},
    'getattr(self, "notify")(1)': {"self.notify()"},
    "getattr(self, name)(1)": {"self.[name]()"},
    'self.handlers["a"](1)': {"self.handlers()"},
    "listener = self.listener if self.listens else None; listener.notify()": {"self.listener.notify()"},
    "listener, n = self.listener, 1; listener.notify()": {"self.listener.notify()"},
    "for listener in (self.first, self.second): listener.notify()": {"self.first.notify()", "self.second.notify()"},
    "with self.lock as held: held.notify()": {"self.lock.notify()"},
    "for i, request in enumerate(req_dicts): request.notify()": {"request.notify()"},
    "async_set_value(self.buffer[0:1], 1)": {"self.buffer", "async_set_value()"},
    "np.copyto(self.buffer, 1)": {"self.buffer", "np.copyto()"},
    'async_set_value(tgt=self.proposer.model_inputs["a"], src=1)': {"self.proposer.model_inputs", "async_set_value()"},
    "super().insert_tasks_v1(req_dicts)": {"super()"},
    "for request in req_dicts: request.seen = True": {"request.seen"},
    'request = req_dicts[0]; request.set("a", 1)': {"request.set()"},
    'req_dicts[0].get("a").pop("b")': {"request.a.pop()"},
    "for i, request in enumerate(req_dicts): request.seen = True": {"request.seen"},
    "req_dicts.sort()": {"req_dicts.sort()"},
    'os.environ["A"] = "1"': {"os.environ"},
    "global SEEN; SEEN = 1": {"global SEEN"},
    "tell(self)": {"tell()", "self"},
    "tell(self.share_inputs)": {"tell()", "self.share_inputs"},
    "kept = [self.share_inputs]; kept[0].a = 1": {"self.share_inputs", "kept[0].a"},
}
NOTHING = [
    'x = self.share_inputs["a"][0] > 1',
    'if self.share_inputs["a"]: pass',
    'x = 1 if self.share_inputs["a"] and self.b else 2',
    'x = len(self.share_inputs["a"]) + int(self.share_inputs["a"][0])',
    'x = self.share_inputs["a"].cpu().numpy()',
    'x = f"{self.share_inputs["a"]} {req_dicts[0]}"'.replace('["a"]', "['a']"),
    'assert "a" not in self.share_inputs',
    "x = [] ; x.append(req_dicts[0].pooling_params)",
    'x = {"a": []}; x["a"].append(1); x["b"] = 2',
    'x = req_dicts[0].get("a", 1); y = req_dicts[0].prompt_token_ids.tolist()',
    'x = getattr(self, "hybrid", False)',
    "n, m = req_dicts[0].get('a'), self.config.n; x = max(n, m)",
    "x = [lambda one: one.idx for _ in range(3)]",
]


def names_in(line):
    return names_of(function_from(f"    def insert_tasks_v1(self, req_dicts):\n        {line}\n"))


@pytest.mark.parametrize("line", READ)
def test_what_a_line_writes_sets_and_calls(line):
    assert names_in(line) == READ[line]


@pytest.mark.parametrize("line", NOTHING)
def test_a_line_that_only_reads_has_no_name(line):
    assert names_in(line) == set()


@pytest.mark.parametrize("kind", OF)
def test_a_function_of_known_names_is_accepted(kind):
    found = OF[kind].check(function_from(source_of(kind)))
    assert OF[kind].served <= found


@pytest.mark.parametrize("kind", OF)
@pytest.mark.parametrize("line", [line for line, names in READ.items() if names != {"async_set_value()"}])
def test_a_function_with_one_more_name_is_refused_by_that_name(kind, line):
    known = OF[kind]
    unknown = {one for one in READ[line] if one.partition(".")[0] != "np"} - known.ignored.keys()
    with pytest.raises(
        Unavailable, match=r"Runner.insert_tasks_v1 does .*, which hal's insertion does not .*FD_PLUGINS"
    ):
        known.check(function_from(source_of(kind, [line])))
    try:
        known.check(function_from(source_of(kind, [line])))
    except Unavailable as error:
        named = re.search(r" does (.*), which", error.what)[1].split(", ")
        assert set(named) == unknown


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, known in OF.items() for name in sorted(known.always)]
)
def test_a_function_that_does_not_write_a_tensor_is_refused_by_its_name(kind, name):
    with pytest.raises(Unavailable, match=rf"does not write {re.escape(name)}, which hal's insertion does "):
        OF[kind].check(function_from(source_of(kind, without=[name])))


def test_a_function_without_source_is_refused():
    held = {}
    exec("def insert_tasks_v1(self, req_dicts): pass", held)
    with pytest.raises(Unavailable, match="the source of insert_tasks_v1 cannot be read"):
        names_of(held["insert_tasks_v1"])


def test_what_is_no_def_is_refused():
    with pytest.raises(Unavailable, match=r"the source of .* cannot be read: it is no def"):
        names_of(ANONYMOUS)


def test_the_page_lists_what_is_served_and_ignored():
    """Both tables of the page have the names of the code, and each ignored one its reason."""
    part = PAGE.partition("## What is served, and what is ignored")[2].partition("\n## ")[0]
    for number, kept in enumerate(("served", "ignored")):
        listed = {kind: {} for kind in OF}
        for line in part.split("\n\nIgnored")[number].splitlines():
            if line.startswith("| `"):
                names, kinds, what = (cell.strip() for cell in line.split("|")[1:-1])
                for kind in kinds.split(", "):
                    listed[kind] |= dict.fromkeys(re.findall(r"`([^`]+)`", names), what)
        for kind, known in OF.items():
            assert listed[kind].keys() == {*getattr(known, kept)}, kind
            assert kept == "served" or listed[kind] == known.ignored, kind
