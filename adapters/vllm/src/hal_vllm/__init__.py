"""The slot state of vLLM's model runner V2, written through a hal device.

- ``plugin``: the entry point of ``vllm.general_plugins``; ``settings``: what the environment sets.
- ``installing``: what is put in vLLM's place in a worker, all or nothing; ``signatures``: what vLLM must look like.
- ``stage``, ``buffers``: vLLM's three buffer classes over ``device.write``, one submission a step.
- ``kernels`` and the modules named after its parts: vLLM's kernels in torch's operations, where there is no Triton.
- ``checking``, ``command``: ``hal vllm check``.
"""
