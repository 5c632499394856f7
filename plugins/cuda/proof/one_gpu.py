"""The kit's ranks over NCCL where there is one GPU: each rank tells NCCL another host, so that they may share the GPU.

    --hal-device-factory=one_gpu:opened              the kit, with this folder on the path of modules
    python plugins/cuda/proof/nccl_ranks.py one_gpu:opened

NCCL takes two ranks of one host on one GPU for a mistake. What it calls a host is ``NCCL_HOSTID`` (its documentation,
environment variables), and between hosts it goes over sockets, here of the loopback device. So hal's communicator, its
order, its watchdog and how it gives a communicator up are the real ones; NVLink is not used, and the ranks' kernels
take turns on the GPU, so times tell nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hal_core import Device
from hal_cuda import CudaPlugin
from hal_cuda.conformance import CudaSupport, no_ranks, visible_gpus

APART = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


class OneGpu(CudaSupport):
    """Ranks that share the first GPU; all of them can be one group too."""

    def __init__(self) -> None:
        super().__init__()
        self._gpus = visible_gpus()[:1]
        self._no_ranks = no_ranks(2) if self._gpus else "no GPU is visible"
        self.ranks = self.whole_group = not self._no_ranks

    def rank_environment(self, rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        """The same GPU, and a host of its own."""
        return super().rank_environment(rank, endpoints) | APART | {"NCCL_HOSTID": f"hal-rank-{rank}"}


def opened() -> Device:
    """The first GPU."""
    return CudaPlugin.open(0, {})


opened.support = OneGpu  # type: ignore[attr-defined]  # what the kit looks for
