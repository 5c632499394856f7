"""Work of two ranks for the tests of seeds 000 and 001."""

import importlib.util
from pathlib import Path

import numpy as np
import paddle
from hal_core import predict_launch_tokens
from hal_core.devices.cpu import CpuPlugin
from hal_core.runtime.bound import bind
from hal_fastdeploy import Agreement, Insertion, SaveOutput
from hal_fastdeploy.agreeing import NAMES
from hal_fastdeploy.sysv.layouts import Variant, layout_named, messages

_spec = importlib.util.spec_from_file_location("upstream_of_seeds", Path(__file__).with_name("upstream.py"))
up = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(up)
STEPS = 3


class Captured:
    """A sink that keeps the messages as bytes."""

    def __init__(self, layout):
        self.layout, self.found, self.session = layout_named(layout), [], 1

    def put(self, pending):
        record = pending.resolve()
        made = messages(record, pending.batch_ids, pending.batch_size, self.layout, Variant(), pending.goes_on)
        self.found += [message.data for message in made]


def decode_request(slot):
    """A request of the decode role with its first token and one draft."""
    return up.Request(
        up.PREFILL, slot, f"r{slot}", prompt_token_ids=[4, 5, 6], output_token_ids=[9], prefill_start_index=3,
        prefill_end_index=4, block_tables=[slot], eos_token_ids=[2, 5], draft_token_ids=[9, 7], values={"seed": 1},
    )  # fmt: skip


def runner_with(method):
    """A runner of the decode role over Paddle's tensors, with a step's outputs, and its proposer's inputs."""
    arrays = up.target_arrays(method) | up.arrays(
        "accept_tokens i64 n,D 0 | accept_num i32 n 0 | next_tokens i64 n,1 0"
    )
    tensors, own = (
        {name: paddle.to_tensor(array) for name, array in some.items()} for some in (arrays, up.proposer_arrays(method))
    )
    return up.runner_of(tensors, own, method=method, role="decode", cached=8)


def run(rank, fixed):
    """Two requests enter; each rank samples with its own generator; return the rank's next input, step by step.

    Seed 000 without its fix: no rank receives the first rank's tokens. Seed 001 without its fix: every rank sends.
    """
    draw, sinks, fed = np.random.default_rng(rank.rank), {}, []
    with bind(CpuPlugin.open(0, {})) as device:
        runner = runner_with("mtp")
        inputs, model_inputs = runner.share_inputs.data, runner.proposer.model_inputs.data
        agreement = Agreement(device, [inputs, model_inputs], tensor_parallel_size=2, rank=rank.rank)
        insertion = Insertion(device, runner, lambda *given: None)
        insertion([decode_request(0), decode_request(2)], 4).wait()
        saving = SaveOutput(lambda layout: sinks.setdefault(layout, Captured(layout)))
        for _ in range(STEPS):
            inputs["accept_tokens"][:] = paddle.to_tensor(draw.integers(0, 1000, (4, 4)))
            inputs["accept_num"][:] = paddle.to_tensor(draw.integers(1, 5, 4).astype(np.int32))
            if fixed != "000":
                agreement().wait()
            fed.append({name: inputs[name].tolist() for name in NAMES})
            lengths, preempted = inputs["seq_lens_decoder"].numpy(), np.zeros((4, 1), np.int32)
            mp_rank = 0 if fixed == "001" else rank.rank
            tokens, counts = inputs["accept_tokens"].numpy(), inputs["accept_num"].numpy()
            saving.speculate_save_output(
                tokens, counts, np.array([False]), lengths, lengths, preempted, mp_rank, False, True
            )
        sent = [data for sink in sinks.values() for data in sink.found]
        predicted = predict_launch_tokens(runner._cached_real_bsz, up.DRAFTS + 1)
        return fed, sent, (runner._cached_launch_token_num, predicted)
