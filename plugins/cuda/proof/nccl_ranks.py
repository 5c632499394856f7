"""G13 to G16 on two GPUs over NCCL: the parent starts two ranks of itself and prints what each found.

python plugins/cuda/proof/nccl_ranks.py
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

TIMEOUT = 6.0


def rank_main() -> None:
    """One rank: equal fields after a broadcast, terms that differ, and a peer that is lost."""
    import numpy as np
    import paddle

    rank = int(os.environ["PADDLE_TRAINER_ID"])
    paddle.device.set_device(f"gpu:{rank}")
    from hal_core import Group, Sizes
    from hal_core.bound import bind
    from hal_core.errors import GroupLost, HalError
    from hal_cuda import CudaPlugin, nccl

    nccl.DEFAULT_TIMEOUT = TIMEOUT
    nccl.open_communicator.__defaults__ = (TIMEOUT,)
    bound, group = bind(CudaPlugin.open(rank, {})), Group((0, 1), rank)
    found: dict[str, object] = {}
    for name, sizes in (("plain", Sizes(slots=128, max_tokens=64)), ("speculative", Sizes(128, 64, max_draft=5))):
        state, stream = bound.state(sizes), bound.default_stream
        fields = ["accept_tokens", "accept_num", "step_idx"] if state.speculative else ["sampled_token_ids"]
        for turn in range(3):
            for field in fields:
                place = state.layout.fields[field]
                value = np.random.default_rng(100 * turn + rank).integers(0, 99, (128, place.width))
                bound.async_set_value(target=state.view(field), value=value, stream=stream)
            bound.async_set_value(target=state.view("prompt_lens"), value=rank + 5, stream=stream)
            before = bound.counters().collectives
            bound.broadcast_tokens(state=state, group=group, stream=stream).wait(TIMEOUT)
            assert bound.counters().collectives - before == 1
            part = state.output_range(topk=False)
            copied = bound.device.copy_out(state.memory, [part], stream)
            copied.wait(TIMEOUT)
            columns = state.columns(copied.data[0], part)
            for field in fields:
                place = state.layout.fields[field]
                source = np.random.default_rng(100 * turn).integers(0, 99, (128, place.width))
                np.testing.assert_array_equal(columns[field], source)
        found[f"G13 {name}"] = "equal on both ranks, 3 broadcasts, one collective each"
    try:
        other = bound.state(Sizes(slots=128 + rank, max_tokens=64), name="other")
        bound.broadcast_tokens(state=other, group=group, stream=bound.default_stream).wait(TIMEOUT)
        found["G14"] = "NOT REFUSED"
    except HalError as error:
        found["G14"] = f"refused: {str(error)[:120]}"
    print(json.dumps(found), flush=True)
    if rank == 1:
        os._exit(9)  # the lost peer
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + 2 * TIMEOUT:  # a source may push a few into buffers of the dead
            bound.broadcast_tokens(state=state, group=group, stream=bound.default_stream).wait(2 * TIMEOUT)
        found["G16"] = "NO ERROR"
    except GroupLost as error:
        found["G16"] = f"GroupLost after {time.monotonic() - begin:.1f} s: {str(error)[:100]}"
    print(json.dumps(found), flush=True)
    os._exit(0)


def main() -> int:
    """Start both ranks; 0 when each found what it should."""
    if "PADDLE_TRAINER_ID" in os.environ:
        rank_main()
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    ranks = []
    for rank, endpoint in enumerate(endpoints):
        env = os.environ | {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoint,
            "FLAGS_selected_gpus": str(rank),
            "PADDLE_DISTRI_BACKEND": "nccl",
            "NCCL_NVLS_ENABLE": "0",
        }
        ranks.append(subprocess.Popen([sys.executable, __file__], env=env, stdout=subprocess.PIPE, text=True))
    good = True
    for rank, process in enumerate(ranks):
        try:
            output = process.communicate(timeout=120)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + "\nTIMED OUT"
        lines = [line for line in output.splitlines() if line.startswith("{")]
        found = json.loads(lines[-1]) if lines else {}
        print(f"rank {rank}: {json.dumps(found, indent=1)}")
        wanted = {"G13 plain", "G13 speculative", "G14"} | ({"G16"} if rank == 0 else set())
        good = good and wanted <= set(found) and "NO" not in "".join(str(v)[:3] for v in found.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
