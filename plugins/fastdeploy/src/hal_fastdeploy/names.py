"""The names of FastDeploy's functions that hal knows: what an insertion serves, and what it ignores, with the reason.

Served are the tensors of :mod:`hal_fastdeploy.batches` and the host data of :mod:`hal_fastdeploy.host`. A function that
does anything else must not be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hal_core import Unavailable

from . import host
from .batches import DRAFTED, PROPOSER, Table
from .host import Host
from .reading import names_of
from .runners import GpuRunner, XpuRunner

MULTIMODAL = "multimodal models: the whole call goes to FastDeploy's function"
GUIDED = "guided decoding: the whole call goes to FastDeploy's function"
REPLAY = "routing replay: the whole call goes to FastDeploy's function"
PLAN = "how FastDeploy writes a tensor: here it is one plan"
MEMORY = "makes an array or a tensor"
LOG = "writes a log"
PLATFORM = "asks for the platform"
COMMON: Mapping[str, str] = {
    "self._process_mm_features()": MULTIMODAL,
    "self.prepare_rope3d()": MULTIMODAL,
    "req_dicts.requests.sort()": MULTIMODAL,
    "self._init_logits_processor()": GUIDED,
    "request.schemata_key": GUIDED,
    "request.sampling_params.stop_seqs_len.append()": "pads the request's list in place: here a copy is padded",
    "async_set_value()": PLAN,
    "np.*": MEMORY,
    "paddle.to_tensor()": MEMORY,
    "logger.*": LOG,
    "current_platform.*": PLATFORM,
}
GPU: Mapping[str, str] = {
    "share_inputs.decode_states": MULTIMODAL,
    "share_inputs.attn_mask_offsets_full": MULTIMODAL,
    "share_inputs.rope_emb": MULTIMODAL,
    "self.routing_replay_manager.register_request()": REPLAY,
    "self.routing_replay_manager.clear_request()": REPLAY,
}
OF_PROPOSER: Mapping[str, str] = {
    "model_inputs.attn_mask_offsets_full": MULTIMODAL,
    "model_inputs.attn_mask_offsets_decoder": MULTIMODAL,
    "async_set_value()": PLAN,
    "np.*": MEMORY,
    "paddle.to_tensor()": MEMORY,
    "logger.*": LOG,
    "current_platform.*": PLATFORM,
}


@dataclass(frozen=True, slots=True)
class Known:
    """The names of one function. ``always``: the tensors that an insertion writes whatever the version.

    ``served``: name to what hal does; ``ignored``: name to the reason why it does nothing. A name that ends with ``*``
    stands for all that begin with the rest.
    """

    always: frozenset[str]
    served: Mapping[str, str]
    ignored: Mapping[str, str]

    @classmethod
    def of(
        cls, batch: str, always: Table, optional: Table, hosts: tuple[Host, ...], ignored: Mapping[str, str]
    ) -> Known:
        """Put the tables together."""
        served = {f"{batch}.{name}": "" for name in (*always, *optional)}
        served |= {name: one.what for one in hosts for name in one.names}
        return cls(frozenset(f"{batch}.{name}" for name in always), served, ignored)

    def check(self, function: Callable[..., Any]) -> frozenset[str]:
        """Return the names in a function's source.

        :raises Unavailable: naming each that is neither served nor ignored, and each tensor that hal would write and
            the function does not.
        """
        found = names_of(function)
        unknown = sorted(name for name in found - self.served.keys() if not self._is_ignored(name))
        missing = sorted(self.always - found)
        does = [f"does {', '.join(unknown)}, which hal's insertion does not"] if unknown else []
        does += [f"does not write {', '.join(missing)}, which hal's insertion does"] if missing else []
        if does:
            raise Unavailable(
                f"FastDeploy's {function.__qualname__} {' and '.join(does)}",
                cure="unset FD_PLUGINS, or use a version of hal that knows this FastDeploy",
                argument="FD_PLUGINS",
            )
        return found

    def _is_ignored(self, name: str) -> bool:
        return name in self.ignored or f"{name.partition('.')[0]}.*" in self.ignored


def _of_runner(kind: type[GpuRunner] | type[XpuRunner], ignored: Mapping[str, str]) -> Known:
    return Known.of("share_inputs", {**kind.tensors, **DRAFTED}, kind.optional, kind.hosts, {**COMMON, **ignored})


KNOWN: Mapping[type[GpuRunner] | type[XpuRunner], Known] = {
    GpuRunner: _of_runner(GpuRunner, GPU),
    XpuRunner: _of_runner(XpuRunner, {}),
}
PROPOSED = Known.of("model_inputs", PROPOSER, {}, host.PROPOSER, OF_PROPOSER)
