"""A user's request: every wrong argument is refused by name and with a cure, before anything is packed."""

import copy
import pickle

import msgspec
import numpy as np
import pytest
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import InvalidValue
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, SamplingParams, admit
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.layout import lay_out

SIZES = StateConfig(num_slots=2, max_model_len=16)


def refused(argument, call):
    with pytest.raises(InvalidValue) as raised:
        call()
    assert raised.value.argument == argument
    assert raised.value.cure


@pytest.mark.parametrize("name", [None, 7, b"r", "", "a\0b", "\ud800", "r\udfff"])
def test_a_name_that_no_frame_can_carry_is_refused(name):
    refused("request_id", lambda: Request(name, [1]))


def test_any_other_text_is_a_name():
    assert admit(Request("żółć \U0001f600", [1]), lay_out(SIZES)).request_id == "żółć \U0001f600"


@pytest.mark.parametrize("role", [9, 1, "prefill", None])
def test_a_role_is_a_split_role(role):
    refused("role", lambda: Request("r", [1], role=role))
    assert Request("r", [1], role=SplitRole(1)).role is SplitRole.PREFILL


@pytest.mark.parametrize("params", [{"max_tokens": 3}, None, SamplingParams])
def test_params_are_sampling_params(params):
    refused("params", lambda: Request("r", [1], params))


@pytest.mark.parametrize("prompt", [[[1], [2, 3]], [[1, 2]], "abc", None, 5, [1.5], [None], {1: 2}, [2**80], [True]])
def test_a_prompt_is_one_list_of_whole_numbers(prompt):
    for request in (Request("r", prompt), Request("r", [1], output=prompt)):
        refused("request 'r'", lambda request=request: admit(request, lay_out(SIZES)))


@pytest.mark.parametrize("name", ["eos_token_ids", "bad_words", "stop_sequences"])
@pytest.mark.parametrize("value", [2, None, "ab", (1.5,), (None,), (-1,)])
def test_lists_of_token_ids_are_lists_of_token_ids(name, value):
    refused(name, lambda: SamplingParams(**{name: value}))


def test_numpys_numbers_become_pythons():
    """A seed of NumPy's could not be packed, and none of its numbers be sent to another process."""
    integers = dict.fromkeys(("top_k", "seed", "min_tokens", "max_tokens", "logprobs"), np.int64(7))
    parts = dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), np.float32(0.5))
    parts |= {"frequency_penalty": np.longdouble(0.5), "presence_penalty": np.int8(1)}
    ids = {"bad_words": np.array([3, 4]), "eos_token_ids": [np.int32(2)], "stop_sequences": [np.array([5, 6]), [7]]}
    params = SamplingParams(**integers, **parts, **ids)
    plain = dict.fromkeys(integers, 7) | dict.fromkeys(parts, 0.5) | {"presence_penalty": 1}
    plain |= {"bad_words": (3, 4), "eos_token_ids": (2,), "stop_sequences": ((5, 6), (7,))}
    assert params == SamplingParams(**plain)
    sent = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(sent, type=SamplingParams) == params
    assert sent == msgspec.msgpack.encode(SamplingParams(**plain))
    sizes = StateConfig(num_slots=2, max_model_len=16)
    made = admit(Request("r", [1, 2], SamplingParams(seed=np.int64(7), max_tokens=np.int64(7))), lay_out(sizes))
    other = admit(Request("r", [1, 2], SamplingParams(seed=7, max_tokens=7)), lay_out(sizes))
    assert len(made.packed) == len(other.packed)


@pytest.mark.parametrize("value", [(13, 10), [13], np.array([13, 10]), ((),), ((1, "a"),)])
def test_stop_sequences_are_lists_in_a_list(value):
    refused("stop_sequences", lambda: SamplingParams(stop_sequences=value))


def test_admission_takes_a_request_a_layout_and_a_count():
    device = bind(CpuPlugin.open(0, {}))
    state = device.state(SIZES)
    refused("layout", lambda: admit(Request("r", [1]), state))
    refused("layout", lambda: admit(Request("r", [1]), SIZES))
    refused("request", lambda: admit("r", state.layout))
    refused("vocab_size", lambda: admit(Request("r", [1]), state.layout, vocab_size="100"))
    device.close()


def test_what_admission_packs_is_the_requests_own_and_no_others():
    layout = lay_out(StateConfig(num_slots=2, max_model_len=64))
    params = SamplingParams(temperature=0.25, top_k=7, eos_token_ids=(3,), max_tokens=9)
    first, second = admit(Request("r", [1, 2], params), layout), admit(Request("s", [4]), layout)
    one, other = (np.frombuffer(each.packed, layout.admission_dtype)[0] for each in (first, second))
    assert (first.config_key, second.config_key) == (layout.config_key,) * 2
    assert (one["admission_id"], other["admission_id"]) == (first.admission_id, second.admission_id)
    assert (one["record"]["request_serial"], other["record"]["request_serial"]) == (
        first.admission_id,
        second.admission_id,
    )
    assert (one["record"]["temperature"], one["record"]["top_k"], one["record"]["eos_num"]) == (0.25, 7, 1)
    assert (other["record"]["top_k"], other["record"]["eos_num"]) == (SamplingParams().top_k, 0)


def test_an_admitted_request_stays_in_its_process():
    """Its admission id, which devices use as its key, means another request elsewhere."""
    request = admit(Request("r", [1, 2]), lay_out(StateConfig(num_slots=1, max_model_len=8)))
    for carry in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(InvalidValue, match="admit it where it is inserted"):
            carry(request)


class TestTokenArrays:
    """Prompts that are arrays: of any integer type, in any order, longer than one copied piece."""

    LONG = lay_out(StateConfig(num_slots=1, max_model_len=4096))

    @pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, ">i4"])
    @pytest.mark.parametrize("count", [1, 499, 500, 501, 1700])
    def test_every_token_is_copied(self, dtype, count):
        prompt = (np.arange(2 * count) % 251).astype(dtype)[::-2]
        admitted = admit(Request("r", prompt, SamplingParams(max_tokens=900), prompt[:700]), self.LONG)
        expected = [*prompt.tolist(), *prompt[:700].tolist()]
        prompt[:] = 9
        assert admitted.tokens.tolist() == expected
        assert (admitted.prompt_len, admitted.generated) == (count, min(count, 700))

    @pytest.mark.parametrize("where", [0, 499, 500, 1023])
    @pytest.mark.parametrize("wrong", [-1, 2**31, 2**40, -(2**63)])
    def test_a_token_that_is_no_id_is_found_anywhere(self, where, wrong):
        prompt = np.full(1024, 5)
        prompt[where] = wrong
        for name, given in (("prompt", (prompt, ())), ("output", ([5], prompt))):
            with pytest.raises(InvalidValue, match=f"{name} must be one list of token ids"):
                admit(Request("r", given[0], SamplingParams(max_tokens=2000), given[1]), self.LONG)

    def test_the_largest_token_is_compared_with_the_vocabulary(self):
        prompt = np.full(1024, 5, np.int32)
        prompt[700] = 300
        assert admit(Request("r", prompt), self.LONG, vocab_size=301).total == 1024
        with pytest.raises(InvalidValue, match="token 300 is outside the vocabulary of 300"):
            admit(Request("r", prompt), self.LONG, vocab_size=300)
