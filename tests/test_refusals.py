"""What a command cannot do is one line with the cure, exit status 2, before anything is loaded or started."""

import re

import pytest

X = ("run", "--temperature=0", "--prompt", "x")
CPU = (*X, "--device", "cpu")
MIX = ("--runner", "hal_sim.mixing:MixRunner")
NEEDS_HOST = "--overlap: the Paddle model needs the host between two steps: its tokens are chosen on the host"
NOT_SENT = "characters that clients cannot send in a header (give a key of ASCII letters, digits and signs)"
ROWS = [
    ((), "which command?"),
    (("nothing",), "no such command 'nothing' (hal -h lists the commands)"),
    (("devics",), "no such command 'devics' (did you mean 'devices'?)"),
    (("devices", "--bad"), "--bad: no such option (hal devices -h lists the options)"),
    (("devices", "extra"), "it takes no argument 'extra' (hal devices -h lists the options)"),
    (("devices", "--js"), "--js: no such option (did you mean --json?)"),
    (("devices", "--jsn", "-v"), "--jsn: no such option (did you mean --json"),
    (("devices", "--timeout"), "--timeout: it needs a value"),
    (("devices", "--timeout", "0"), "--timeout: 0 (give seconds from 0.1 to 86400)"),
    (("devices", "--timeout", "nan"), "--timeout: nan (give seconds"),
    (("devices", "--timeout", "soon"), "--timeout: 'soon' is no number"),
    (("devices", "--timeout", "3"), "--timeout: nothing is opened (give --open as well, or leave it out)"),
    (("doctor", "--timeout", "0"), "--timeout: 0 (give seconds from"),
    (("tail",), "URL: it is missing (hal tail -h lists the options)"),
    (("tail", "somewhere"), "URL: 'somewhere' has no scheme of "),
    (("conform", "cpu", "--only", "G99"), "--only: 'G99' is not a guarantee"),
    (("conform", "cpu", "--only", "G5-G3"), "--only: 'G5-G3' is not a guarantee"),
    (("conform", "nothing"), "NAME: no device 'nothing'; installed: "),
    (
        ("conform", "cpu", "--replay", "x", "--seed", "0"),
        "--seed: --replay makes the calls of a recording and runs no test",
    ),
    (("serve", "--port", "99999"), "--port: 99999 (give a number from 0 to 65535)"),
    (
        ("serve", "--host", "0.0.0.0"),
        "--host: 0.0.0.0 is reached from other hosts (set HAL_API_KEY to a key for clients, or give --api-key)",
    ),
    (("serve", "--model", "/"), "--model: no config.json in '/' (give the directory of a checkpoint)"),
    (("serve", "--api-key", ""), "--api-key: an empty key (give one, or leave the option out)"),
    (("serve", "--api-key", " \n"), "--api-key: an empty key (give one, or leave the option out)"),
    (("serve", "--api-key", "schlüssel"), f"--api-key: {NOT_SENT}"),
    (("serve", "--api-key", "a\nb"), f"--api-key: {NOT_SENT}"),
    (("serve", "--slots", "0"), "--slots: 0 (give a whole number of at least 1)"),
    (("new-plugin", "sim"), "NAME: a device 'sim' is installed (give another name, or uninstall that plugin)"),
    (("new-plugin", "class"), "NAME: 'class' is a keyword of Python (give another name)"),
    (("new-plugin", "match"), "NAME: 'match' is a keyword of Python (give another name)"),
    (("new-plugin", "core"), "NAME: a module hal_core is installed (give another name)"),
    (("new-plugin", "My-Chip"), "NAME: 'My-Chip' is no name for a device (give small letters, digits and single under"),
    (("new-plugin", "../x"), "NAME: '../x' is no name for a device"),
    (("new-plugin", "9x"), "NAME: '9x' is no name for a device"),
    (("new-plugin", "x" * 41), "NAME: the name has 41 characters, at most 40 are possible (give another name)"),
    (("new-plugin", "mychip"), "--into: the folder 'hal-mychip' is not empty (name a new or empty"),
    (("new-plugin", "mychip", "--into", "file"), "--into: 'file' is no folder (name another one with"),
    (("new-plugin", "mychip", "--into", "a/b"), "--into: the folder 'a' does not exist (make it first"),
    (("new-plugin", "mychip", "--kind", "gpu"), "--kind: 'gpu' is no kind of device (give async, sync,"),
    # prompts and sampling
    (("run", "--promt", "x"), "--promt: no such option (did you mean --prompt"),
    (("run", "--prompt", ""), "the only prompt is empty"),
    (("run", "-q", "--prompt", ""), "the only prompt is empty"),
    (("run", "--prompt", "", "--prompt", ""), "all 2 prompts are empty"),
    (("run", "--prompts", "."), "--prompts: cannot read '.': Is a directory"),
    (("run", "--prompts", "/nowhere"), "--prompts: no file '/nowhere'"),
    (("run", "--prompts", "nothing"), "is empty"),
    (("run", "--prompts", "lines"), "has empty lines alone"),
    (("run", "--prompts", "bytes"), "is no UTF-8 text"),
    ((*X, "--temperature", "nan"), "--temperature: nan (give a number from 0.0"),
    ((*X, "--temperature", "-1"), "--temperature: -1.0 (give a number"),
    ((*X, "--temperature", "warm"), "--temperature: 'warm' is no number"),
    ((*X, "--top-k", "-2"), "--top-k: -2 (give a whole number"),
    ((*X, "--top-k", "5"), "--top-k: nothing is drawn at --temperature 0"),
    ((*X, "--top-p", "0"), "--top-p"),
    ((*X, "--min-p", "1.5"), "--min-p: 1.5 (give a number from 0.0 to 1.0)"),
    ((*X, "--min-p", "-0.1"), "--min-p: -0.1 (give a number from 0.0 to 1.0)"),
    ((*X, "--min-p", "nan"), "--min-p: nan (give a number"),
    ((*X, "--seed", "-1"), "--seed: -1"),
    ((*X, "--max-tokens", "0"), "--max-tokens: 0"),
    ((*X, "--max-tokens", "-5"), "--max-tokens: -5"),
    ((*X, "--max-tokens", "512"), "lower max_tokens to 511"),
    ((*X, "--min-tokens", "65"), "--min-tokens: 65 (give a whole number from 0 to 64)"),
    ((*X, "--logprobs", "-1"), "--logprobs: -1"),
    ((*X, "--json", "--logprobs", "99999"), "ask for fewer"),
    ((*X, "--logprobs", "2"), "--logprobs: text does not show them (give --json as well"),
    ((*X, "--stop", ""), "--stop: an empty text"),
    ((*X, "--stop", "a\ufffd"), "--stop: U+FFFD stands for bytes that are no text"),
    ((*X, "--stop", "caf\udcc3\udca9"), "--stop: "),
    ((*X, "--stop", "\udce9"), "locale"),
    (("run", "--prompt", "x", "--prompt", "caf\udcc3\udca9"), "--prompt: "),
    (("run", "--prompt", "x", "--prompt", "\udce9"), "locale"),
    ((*X, "-q", "-v"), "--quiet: it contradicts --verbose"),
    # the engine
    ((*X, "--slots", "0"), "--slots: 0 (give a whole number of at least 1)"),
    ((*X, "--blocks", "-1"), "--blocks: -1"),
    ((*X, "--blocks", "1"), "--blocks: 1 of 16 tokens cannot hold any of the prompts"),
    ((*X, "--chunk", "0"), "--chunk: 0"),
    ((*X, "--sink", "bla://x"), "--sink: 'bla://x' has no scheme of "),
    ((*X, "--device", "gpu"), "--device: no device 'gpu'; installed: "),
    ((*X, "--device", "cpu:7"), "cpu: index: no device cpu:7: there is only cpu:0 (choose another)"),
    ((*X, "--device", "cpuu"), "--device: no device 'cpuu'"),
    ((*X, "--device", "sims"), "--device: no device 'sims'"),
    ((*X, "--require", "async_set_value"), "--require: 'async_set_value' is no NAME=VALUE"),
    ((*X, "--require", "=async"), "--require: '=async' is no NAME=VALUE"),
    ((*X, "--require", "speed=high"), "cpu: --require: unknown requirement 'speed'"),
    ((*X, "--require", "async_set_value=fast"), "cpu: --require: async_set_value = 'fast'"),
    ((*X, "--require", "async_h2d=yes"), "cpu: --require: needs async_h2d = True, has False"),
    ((*X, "--model", "/nowhere"), "--model: no directory '/nowhere'"),
    ((*X, "--model", "/"), "--model: no config.json in '/' (give the directory of a checkpoint)"),
    ((*X, "--model", "no-org/no-model"), "(fetch it: hf download no-org/no-model)"),
    ((*X, "--model-place", "moon"), "--model-place: 'moon'"),
    ((*X, "--model-place", "xpu"), "--model-place: 'xpu' is not a place of this Paddle build"),
    ((*CPU, "--overlap", "on"), f"{NEEDS_HOST} (give a --runner"),
    ((*CPU, "--overlap", "maybe"), "--overlap: 'maybe' (give auto, on, off)"),
    ((*CPU, "--runner", "nowhere:"), "--runner: 'nowhere:' (give MODULE:NAME"),
    ((*CPU, "--runner", "no.such.module:Runner"), "--runner: no.such.module:Runner: No module named 'no'"),
    ((*CPU, "--runner", "hal_sim.mixing:Nobody"), "has no attribute 'Nobody' (install it, or"),
    ((*CPU, "--runner", "hal_sim.mixing:MixRuner"), "has no attribute 'MixRuner' (hal_sim.mixing has MixRunner)"),
    ((*CPU, "--runner", "my_runner.MyRunner"), "(did you mean my_runner:MyRunner?)"),
    ((*CPU, "--runner", "my"), "(pip install -e hal-my)"),
    ((*CPU, *MIX), "runs only on the sim device, not on cpu:0 (give --device sim"),
    ((*CPU, *MIX, "--speculate", "ngram"), "--speculate: ngram drafts beside"),
    ((*CPU, "--speculate", "mtp", "--drafts", "6"), "--drafts: 6 (give a whole number from 1 to 5)"),
    ((*CPU, "--speculate", "ngram", "--drafts", "0"), "--drafts: 0 (give"),
    ((*CPU, "--speculate", "mtp", "--acceptance", "typical"), "--acceptance: 'typical' (give exact or rejection)"),
    ((*CPU, "--acceptance", "rejection"), "--acceptance: there are no drafts to accept"),
    ((*CPU, "--speculate", "oracle"), "--speculate: no installed proposer is called 'oracle'; installed: "),
    ((*CPU, "--record", "/nowhere/x"), "--record: No such file or directory: /nowhere/x (make its folder, or name"),
    ((*CPU, "--record", "/"), "--record: Is a directory: / (name a file in it)"),
    ((*CPU, "--live"), "--live: standard error is no terminal (leave it out)"),
    ((*CPU, "--live", "-q"), "--live: it contradicts --quiet (leave it out)"),
    ((*CPU, "--trace", "/nowhere/x"), "--trace: /nowhere/x: No such file or directory (give a file in a folder that"),
    ((*CPU, "--trace", "/"), "--trace: /: Is a directory (give a file in a folder that"),
    # ranks and splits
    ((*CPU, "--record", "x", "--tp", "2"), "--record: a recording has the calls of one rank (leave it out, or run one"),
    ((*CPU, "--runner", "a:b", "--tp", "2", "--sampling", "every-rank"), "--sampling: it concerns the Paddle model"),
    ((*CPU, "--tp", "2", "--overlap", "on"), NEEDS_HOST),
    ((*X, "--split", "1"), "--split: '1' (give the number of prefill and of decode workers, at least 1 each, as 1,1)"),
    ((*X, "--split", "0,1"), "--split: '0,1' (give the number of prefill and of decode workers"),
    ((*X, "--split", "1,1", "--dp", "2"), "--dp: 2 groups of ranks beside a split (leave it out: a split has the"),
    ((*X, "--split", "1,1", "--tp", "3"), "--tp: 3 ranks cannot share out num_attention_heads = 4"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Some files, in the current folder; it is the same afterwards."""
    files = {"file": b"", "nothing": b"", "lines": b"\n\n", "bytes": b"\xff\xfe", "hal-mychip/work.py": b"mine"}
    files["hal-my/pyproject.toml"] = b""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    yield
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
    assert {path.name for path in tmp_path.iterdir()} == {name.partition("/")[0] for name in files}


@pytest.mark.usefixtures("folder", "private_folders")
@pytest.mark.parametrize(("arguments", "message"), ROWS, ids=lambda value: "" if isinstance(value, str) else None)
def test_what_cannot_be_is_one_line(command, arguments, message):
    done = command(*arguments)
    assert (done.status, done.out) == (2, "")
    assert re.match("hal( conform)?: error: ", done.err)
    assert message in done.err
    assert done.err.count("\n") == 1
