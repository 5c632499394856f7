"""The kit's ranks over NCCL on one GPU: each rank names another host to NCCL, which then lets them share the GPU.

    --hal-device-factory=one_gpu:opened              the kit, with this folder on the path of modules
    python plugins/cuda/proof/nccl_ranks.py one_gpu:opened

NCCL refuses two ranks of one host on one GPU. It names a host by ``NCCL_HOSTID`` (its documentation, environment
variables), and between hosts it uses sockets, here over the loopback device. So hal's communicator, its order, its
watchdog and its abort are the real ones. NVLink is not used, and the ranks' kernels take turns on the GPU, so times are
not meaningful.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hal_core import Device
from hal_cuda import CudaPlugin
from hal_cuda.conformance import CudaSupport, no_ranks, visible_gpus

APART = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


class OneGpu(CudaSupport):
    """Ranks that share the first GPU; all of them can form one group too."""

    def __init__(self) -> None:
        super().__init__()
        self._gpus = visible_gpus()[:1]
        self._no_ranks = no_ranks(2) if self._gpus else "no GPU is visible"
        self.ranks = self.four_ranks = not self._no_ranks

    def rank_environment(self, rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        """Return the same GPU, and a separate host name, for each rank."""
        return super().rank_environment(rank, endpoints) | APART | {"NCCL_HOSTID": f"hal-rank-{rank}"}


def opened() -> Device:
    """Open the first GPU."""
    return CudaPlugin.open(0, {})


opened.support = OneGpu  # type: ignore[attr-defined]  # read by the kit
