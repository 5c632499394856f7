"""A comparison of two model runner classes: what their ``insert_tasks_v1`` leave differently, by kind of task.

    python -m hal_fastdeploy compare MODULE:CLASS MODULE:CLASS

Both get the same drawn requests, over stand-ins for ``share_inputs`` and for the attributes that the function uses.
Runners are made without ``__init__``, so nothing is loaded. MTP's proposers are not compared. It was never run with an
installed FastDeploy.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import standins
from .standins import ABORT, DECODE, PREEMPTED, PREFILL, SIZES, Arrays, Request

CASES = {
    # kind of task: its number, role, method of drafting
    "PREFILL": (PREFILL, "mixed", ""),
    "PREFILL of the decode role": (PREFILL, "decode", ""),
    "PREFILL of the decode role with drafts": (PREFILL, "decode", "naive"),
    "DECODE": (DECODE, "mixed", ""),
    "PREEMPTED": (PREEMPTED, "mixed", ""),
    "ABORT": (ABORT, "mixed", ""),
}
ATTRIBUTES = (
    *("exist_prefill_flag", "_cached_launch_token_num", "_cached_real_bsz", "forward_batch_reqs_list"),
    *("prompt_logprobs_reqs", "in_progress_prompt_logprobs", "pooling_params", "calls"),
)
"""Attributes that are compared; ``calls``: of the sampler and the proposer."""
Make = Callable[[np.ndarray[Any, Any]], Any]


@dataclass
class Difference:
    """One name that differs for a kind of task: in how many draws, and the first of these in words."""

    case: str
    name: str
    example: str
    count: int = 0


def compare(first: type[Any], second: type[Any], *, draws: int = 40, seed: int = 0, make: Make) -> list[Difference]:
    """Return what differs. ``draws``: requests of each kind; ``make``: a tensor from an array."""
    found: dict[tuple[str, str], Difference] = {}
    for case, (kind, role, method) in CASES.items():
        draw = random.Random(f"{seed} {case}")
        for _ in range(draws):
            slot = draw.randrange(SIZES["n"])
            request, cached = standins.drawn(draw, slot, role, {}, [kind]), draw.choice([-1, 8])
            left = [_left(one, request, role, method, cached, make) for one in (first, second)]
            raised = any("the call" in one for one in left)
            for name in ["the call"] if raised else left[0]:
                if example := _difference(*[one.get(name, "returns") for one in left]):
                    found.setdefault((case, name), Difference(case, name, example)).count += 1
    return [*found.values()]


def tensor(array: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401
    """A Paddle tensor on the default place, where FastDeploy's are."""
    import paddle

    return paddle.to_tensor(array)


def _left(runner_class: type[Any], request: Request, role: str, method: str, cached: int, make: Make) -> dict[str, Any]:
    """Insert a copy of the request; return tensors, host lists and attributes by name, or the error."""
    arrays: Arrays = standins.used(standins.target_arrays(method, "gpu") | standins.target_arrays(method, "xpu"))
    runner: Any = object.__new__(runner_class)
    for kind in ("xpu", "gpu"):
        made = standins.runner_of({}, method=method, role=role, cached=cached, kind=kind)
        vars(runner).update(vars(made))
    host = standins.host_of_target("xpu") | standins.host_of_target("gpu")
    inputs = runner.share_inputs = standins.Batch({name: make(array) for name, array in arrays.items()}, host)
    runner.initialize_kv_cache = lambda *_: inputs.data.setdefault("caches", [])
    runner.enable_mm = runner.is_pooling_model = False
    runner.routing_replay_manager = None
    replay = SimpleNamespace(enable_routing_replay=False)
    runner.fd_config = SimpleNamespace(scheduler_config=runner.scheduler_config, routing_replay_config=replay)
    runner.prompt_logprobs_reqs[request.request_id] = runner.in_progress_prompt_logprobs[request.request_id] = "kept"
    try:
        runner.insert_tasks_v1([copy.deepcopy(request)], SIZES["n"])
    except Exception as error:  # noqa: BLE001 (an outcome that is compared)
        return {"the call": f"raises {type(error).__name__}: {error}"}
    found = {name: _read(value) for name, value in inputs.data.items() if name != "caches"}
    return found | {name: _read(getattr(runner, name)) for name in ATTRIBUTES}


def _read(value: Any) -> Any:  # noqa: ANN401
    """A tensor as an array, a request as its id, and lists of these."""
    if hasattr(value, "request_id"):
        return value.request_id
    if isinstance(value, list | tuple):
        return [_read(one) for one in value]
    if isinstance(value, dict):
        return {key: _read(one) for key, one in value.items()}
    return np.array(value.numpy()) if hasattr(value, "numpy") else copy.deepcopy(value)


def _difference(first: Any, second: Any) -> str:  # noqa: ANN401
    """Return the first difference in words, "" for none."""
    if not isinstance(first, np.ndarray) or not isinstance(second, np.ndarray):
        return "" if repr(first) == repr(second) else f"{first} and {second}"
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return f"{first.dtype} {list(first.shape)} and {second.dtype} {list(second.shape)}"
    if np.array_equal(first, second):
        return ""
    at = tuple(np.argwhere(first != second)[0].tolist())
    return f"{list(at)}: {first[at]} and {second[at]}"
