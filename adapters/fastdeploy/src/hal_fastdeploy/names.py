"""The names of FastDeploy's functions that hal knows: what an insertion serves, and what it ignores, with the reason.

Served are the tensors of :mod:`hal_fastdeploy.batches` and the host data of :mod:`hal_fastdeploy.host`. A function that
does anything else must not be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hal_core import Unavailable

from . import host
from .batches import DRAFTED, NO_MORE, PROPOSER, Table
from .host import Host
from .reading import names_of
from .runners import GpuRunner, XpuRunner

MULTIMODAL = "multimodal models: the whole call goes to FastDeploy's function"
GUIDED = "guided decoding: the whole call goes to FastDeploy's function"
REPLAY = "routing replay: the whole call goes to FastDeploy's function"
EVERYWHERE: Mapping[str, str] = {
    "async_set_value()": "how FastDeploy writes a tensor: here it is one plan",
    "np.*": "makes an array",
    "paddle.to_tensor()": "makes a tensor",
    "logger.*": "writes a log",
    "current_platform.*": "asks for the platform",
}
OF_RUNNER: Mapping[str, str] = {
    **dict.fromkeys(("self._process_mm_features()", "self.prepare_rope3d()", "req_dicts.requests.sort()"), MULTIMODAL),
    **dict.fromkeys(("self._init_logits_processor()", "request.schemata_key"), GUIDED),
    "request.sampling_params.stop_seqs_len.append()": "pads the request's list in place: here a copy is padded",
    **EVERYWHERE,
}
MASKS = ("share_inputs.decode_states", "share_inputs.attn_mask_offsets_full", "share_inputs.rope_emb")
OWN_MASKS = ("model_inputs.attn_mask_offsets_full", "model_inputs.attn_mask_offsets_decoder")
RECORDED = ("self.routing_replay_manager.register_request()", "self.routing_replay_manager.clear_request()")
OF_GPU = dict.fromkeys(MASKS, MULTIMODAL) | dict.fromkeys(RECORDED, REPLAY) | {**OF_RUNNER}
OF_PROPOSER = dict.fromkeys(OWN_MASKS, MULTIMODAL) | {**EVERYWHERE}


@dataclass(frozen=True, slots=True)
class Known:
    """The names of one function. ``always``: the tensors that an insertion writes whatever the version.

    ``ignored``: name to the reason why hal does nothing. One that ends with ``.*`` stands for all that begin so.
    """

    always: frozenset[str]
    served: frozenset[str]
    ignored: Mapping[str, str]

    def check(self, function: Callable[..., Any]) -> frozenset[str]:
        """Return the names in a function's source.

        :raises Unavailable: naming each that is neither served nor ignored, and each tensor that hal would write and
            the function does not.
        """
        found, known = names_of(function), self.served | self.ignored.keys()
        unknown = sorted(name for name in found - known if f"{name.partition('.')[0]}.*" not in known)
        missing = sorted(self.always - found)
        does = [f"does {', '.join(unknown)}, which hal's insertion does not"] if unknown else []
        does += [f"does not write {', '.join(missing)}, which hal's insertion does"] if missing else []
        if does:
            what = f"FastDeploy's {function.__qualname__} {' and '.join(does)}"
            cure = "unset FD_PLUGINS, or use a version of hal that knows this FastDeploy"
            raise Unavailable(what, cure=cure, argument="FD_PLUGINS")
        return found


def _known(batch: str, always: Table, optional: Table, hosts: Sequence[Host], ignored: Mapping[str, str]) -> Known:
    tensors, more = (frozenset(f"{batch}.{name}" for name in table) for table in (always, optional))
    return Known(tensors, tensors.union(more, *[one.names for one in hosts]), ignored)


KNOWN: Mapping[type[GpuRunner] | type[XpuRunner], Known] = {
    kind: _known("share_inputs", {**kind.tensors, **DRAFTED}, kind.optional, kind.hosts, ignored)
    for kind, ignored in ((GpuRunner, OF_GPU), (XpuRunner, OF_RUNNER))
}
PROPOSED = _known("model_inputs", PROPOSER, NO_MORE, host.PROPOSER, OF_PROPOSER)
