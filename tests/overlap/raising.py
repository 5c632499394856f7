"""A runner for ``hal run``: as ``MixRunner``, but it raises in the step in which a prompt of seven tokens enters."""

import os

from hal_core import ENTERING
from hal_sim.mixing import MixRunner

MARK = 7


class RaisingRunner(MixRunner):
    def __init__(self, setup):
        super().__init__(setup)
        ranks = os.environ["RAISING_RANKS"].split(",")
        self._raises = str(setup.group.rank) in ranks
        self._method = os.environ["RAISING_METHOD"]

    def check(self, request):
        self._marked = len(request.prompt) == MARK
        self._raise("check")

    def launch(self, state, step, stream):
        kinds, requests = step.tasks.plain["kinds"], step.tasks.requests
        entering = [request for kind, request in zip(kinds, requests, strict=True) if kind in ENTERING]
        self._marked = any(request.prompt_len == MARK for request in entering)
        self._raise("launch")
        return super().launch(state, step, stream)

    def propose(self, state, step, stream):
        self._raise("propose")
        super().propose(state, step, stream)

    def _raise(self, method):
        if self._raises and self._marked and method == self._method:
            raise RuntimeError("no memory")
