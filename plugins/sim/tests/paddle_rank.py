"""One rank of `paddle.distributed` over the simulated collectives; prints its answer as JSON.

python paddle_rank.py NAME      (the environment sets the rank)
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from hal_sim import Accelerator


def start() -> tuple[int, int]:
    paddle.set_device(f"{os.environ['HALSIM_NAME']}:0")
    dist.init_parallel_env()
    return dist.get_rank(), dist.get_world_size()


def tensor(values: Any, dtype: str = "float32") -> paddle.Tensor:
    return paddle.to_tensor(np.array(values, dtype))


def collectives() -> Any:
    rank, ranks = start()
    answer: dict[str, Any] = {}
    t = tensor([rank + 1.0] * 4)
    address = t.data_ptr()
    dist.broadcast(t, src=1)
    answer["broadcast"], answer["address kept"] = t.numpy().tolist(), t.data_ptr() == address
    t = tensor([rank + 1] * 3, "int64")
    dist.all_reduce(t)
    answer["all_reduce"] = t.numpy().tolist()
    t = tensor([rank + 1.0])
    dist.reduce(t, dst=0)
    answer["reduce"] = t.numpy().tolist()
    out = tensor([0.0] * ranks)
    dist.stream.all_gather(out, tensor([rank + 1.0]))
    answer["all_gather"] = out.numpy().tolist()
    out = tensor([0.0])
    dist.reduce_scatter(out, [tensor([float(i)]) for i in range(ranks)])
    answer["reduce_scatter"] = out.numpy().tolist()
    t = tensor([7.0 + rank] * 2)
    (dist.send if rank == 0 else dist.recv)(t, 1 - rank)
    answer["received"] = t.numpy().tolist()
    group = dist.new_group([0, 1])
    t = tensor([rank], "int32")
    dist.all_reduce(t, group=group, op=dist.ReduceOp.MAX)
    answer["group"] = t.numpy().tolist()
    dist.barrier()
    device = Accelerator(0)
    answer["submissions"] = {k: v for k, v in device.counters().items() if k in ("broadcast", "all_reduce")}
    answer["races"] = [str(r) for r in device.races()]
    return answer


def gather_list() -> Any:
    """Paddle's all_gather into a list copies its parts before the collective is waited for."""
    rank, ranks = start()
    parts: list[paddle.Tensor] = []
    dist.all_gather(parts, tensor([rank + 1.0] * 4))
    seen = [part.numpy().tolist() for part in parts]
    paddle.device.synchronize(f"{os.environ['HALSIM_NAME']}:0")
    dist.barrier()
    races = Accelerator(0).races()
    return {"right": seen == [[r + 1.0] * 4 for r in range(ranks)], "races": [str(r) for r in races]}


def lost() -> Any:
    """Rank 1 is killed; return rank 0's error and its time."""
    rank, _ = start()
    t = tensor([1.0])
    dist.all_reduce(t)
    t.numpy()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin, messages = time.monotonic(), []
    for _ in range(2):
        try:
            dist.all_reduce(t)
            t.numpy()
            messages.append("no error")
        except Exception as error:  # noqa: BLE001 - Paddle's error types differ between versions
            messages.append(str(error)[-200:])
    sys.stdout.write(json.dumps({"seconds": time.monotonic() - begin, "messages": messages}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Paddle's own shutdown of a broken group is not under test


if __name__ == "__main__":
    answer = globals()[sys.argv[1]]()
    sys.stdout.write(json.dumps(answer) + "\n")
