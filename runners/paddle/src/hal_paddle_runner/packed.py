"""The decoder's products and attention as oneDNN's calls, on memory that is fixed for a class of sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hal_engine.model.config import LlamaConfig

from .joining import join_layer
from .onednn import Call, Floats, Kernel, Memory, OneDnn, aligned

LAYOUT_ROWS = 32
"""The class of rows whose kernels choose the layout of the weights, which is then every class's."""
PRODUCTS = ("qkv", "output", "gate", "up", "down")


def row_sums(x: Floats, out: Floats) -> None:
    """Write the sum of squares along the last axis."""
    if hasattr(np, "vecdot"):  # since NumPy 2
        np.vecdot(x, x, out=out)
    else:
        np.einsum("...j,...j->...", x, x, out=out)


class Room:
    """Memory that several classes of sizes share: each has its arrays from the beginning on. ``users`` are the classes
    that are forgotten, with their smaller memory, when it grows."""

    def __init__(self) -> None:
        self._memory = aligned(0)
        self.users: dict[Any, Any] = {}

    def arrays(self, *shapes: Sequence[int]) -> list[Floats]:
        """Return arrays of these shapes. A larger memory, if one is needed, is for later calls too."""
        counts = [math.prod(shape) for shape in shapes]
        ends = np.cumsum([-(-count // 16) * 16 for count in counts]).tolist()
        if ends[-1] > self._memory.size:
            self._memory = aligned(max(ends[-1], 2 * self._memory.size))
            self.users.clear()
        begins = [0, *ends[:-1]]
        return [
            self._memory[begin : begin + count].reshape(shape)
            for begin, count, shape in zip(begins, counts, shapes, strict=True)
        ]


@dataclass(frozen=True)
class Layer:
    """The weights of a layer: packed, by the product's name, and its small arrays."""

    products: Mapping[str, Memory]
    biases: Mapping[str, Floats]
    """``[1, n]``, of "qkv" and "output", where there are some."""
    head_norm: Floats | None
    """``[heads + kv_heads, head_dim]``: of the norms of queries and keys; None where there are none."""


class PackedWeights:
    """The weights of a model or of a rank's part of it, in the layouts that oneDNN's kernels like.

    The constant factor of a norm, the root of its width, is in what follows it. In the heads of ``qkv`` that are turned
    the two halves are interleaved, so that the rotation is one complex product.
    """

    def __init__(self, onednn: OneDnn, config: LlamaConfig, tensors: Mapping[str, np.ndarray], *, adds: bool) -> None:
        """``config``: of the part; ``tensors``: only looked at; ``adds``: to the residual, as one rank of them does."""
        self.onednn, self.config, self.adds = onednn, config, adds
        hidden, width, inner = config.hidden_size, config.head_dim, config.intermediate_size
        self.heads, self.kv_heads, self.width = config.num_attention_heads, config.num_key_value_heads, width
        self.turned = self.heads + self.kv_heads
        head = tensors["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
        self.vocabulary = len(head)
        added = ["bias", "sum"] if adds and config.output_bias else ["sum"] if adds else []
        self._shapes: dict[str, tuple[int, int, list[str]]] = {
            "qkv": (hidden, (self.turned + self.kv_heads) * width, ["bias"] if config.qkv_bias else []),
            "output": (self.heads * width, hidden, added),
            "gate": (hidden, inner, ["silu"]),
            "up": (hidden, inner, ["mul"]),
            "down": (inner, hidden, ["sum"] if adds else []),
            "head": (hidden, len(head), []),
        }
        self._layouts = {
            name: self.kernel(name, LAYOUT_ROWS, onednn.layout(shape[:2])).weights
            for name, shape in self._shapes.items()
        }
        pairs = np.arange(width).reshape(2, -1).T.reshape(-1)
        order = np.arange(self._shapes["qkv"][1]).reshape(-1, width)
        order[: self.turned] = order[: self.turned, pairs]
        self._order, self._pairs = order.reshape(-1), pairs
        self.root = np.float32(hidden**0.5)
        self.eps, self.head_eps = (np.float32(config.rms_norm_eps * count) for count in (hidden, width))

    def pack(self, tensors: dict[str, np.ndarray]) -> None:
        """Pack the layers, whose tensors are removed one after the other to make room, and the head."""
        self.layers: list[Layer] = []
        for number in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{number}"
            own = {name: tensors.pop(name) for name in [*tensors] if name.startswith(f"{prefix}.")}
            self.layers.append(self.layer(join_layer(self.config, own, prefix)))
        head = tensors["model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"]
        self.head = self.onednn.packed(head.T, self._layouts["head"])
        self.norm: Floats = tensors["model.norm.weight"] * self.root

    def kernel(self, name: str, rows: int, weights: Any = None) -> Kernel:  # noqa: ANN401 (a layout)
        """Return the product of so many rows with a matrix of the layers, or with the head."""
        inner, outer, ends = self._shapes[name]
        x, y = (self.onednn.layout((rows, count), (count, 1)) for count in (inner, outer))
        extra = [self.onednn.layout((1, outer), (outer, 1))] if "bias" in ends else [y] if "mul" in ends else []
        layout = self._layouts[name] if weights is None else weights
        return self.onednn.product(x, layout, y, ends, *extra)

    def layer(self, arrays: Mapping[str, np.ndarray | None]) -> Layer:
        """Pack a layer (:class:`hal_paddle_runner.weights.LayerWeights`)."""
        products, biases = {}, {}
        for name in PRODUCTS:
            array = arrays[name]
            assert array is not None
            if name == "qkv":
                array = array[:, self._order]
            if name in ("qkv", "gate", "up"):
                array = array * self.root
            products[name] = self.onednn.packed(array, self._layouts[name])
        for name, order in (("qkv", self._order), ("output", slice(None))):
            if (bias := arrays[f"{name}_bias"]) is not None:
                biases[name] = np.ascontiguousarray(bias[order])[None]
        query, key = arrays["q_norm"], arrays["k_norm"]
        if query is None or key is None:
            return Layer(products, biases, None)
        parts = [query[self._pairs]] * self.heads + [key[self._pairs]] * self.kv_heads
        return Layer(products, biases, np.stack(parts) * np.float32(self.width**0.5))


class Rows:
    """The products of all layers for a class of rows, with the buffers between them."""

    def __init__(self, weights: PackedWeights, rows: int, room: Room) -> None:
        heads, kv_heads, width, config = weights.heads, weights.kv_heads, weights.width, weights.config
        hidden, inner, half, turned = config.hidden_size, config.intermediate_size, width // 2, weights.turned
        self.rows, self._weights = rows, weights
        self.x, self.n, qkv, rotated, self.queries, self.attended, gate, up, self.written, self.partial = room.arrays(
            (rows, hidden),
            (rows, hidden),
            (rows, (turned + kv_heads) * width),
            (rows, turned, width),
            (rows, heads * width),
            (rows, heads * width),
            (rows, inner),
            (rows, inner),
            (2 * rows * kv_heads * width,),
            (0 if weights.adds else rows, hidden),
        )
        by_head = qkv.reshape(rows, -1, width)
        self.qk, self.values = by_head[:, :turned], by_head[:, turned:]
        self.complex, self.rotated = self.qk.view(np.complex64), rotated.view(np.complex64)
        halves = rotated.reshape(rows, turned, half, 2).transpose(0, 1, 3, 2)
        self.query_halves, self.key_halves = halves[:, :heads], halves[:, heads:]
        self.query_rows = self.queries.reshape(rows, heads, 2, half)
        self._sums, self._head_sums = aligned(rows), aligned(rows, turned)
        self._sum_column, self._head_sum_column = self._sums[:, None], self._head_sums[:, :, None]
        self.result = self.x if weights.adds else self.partial
        ends = (self.n, qkv), (self.attended, self.result), (self.n, gate), (self.n, up), (up, self.result)
        onednn = weights.onednn
        self._products = {
            name: (weights.kernel(name, rows), *[onednn.memory(onednn.layout_of(one), one) for one in pair])
            for name, pair in zip(PRODUCTS, ends, strict=True)
        }
        self.layers = [self.calls(layer) for layer in weights.layers]
        self.more: list[Call] | None = None
        """The calls of the prediction layer, once it has run so many rows."""

    def calls(self, layer: Layer) -> list[Call]:
        """Return a layer's calls, in the order of :data:`PRODUCTS`."""
        onednn, found = self._weights.onednn, []
        for name, (kernel, x, y) in self._products.items():
            extra = {"end0": self._products["gate"][2]} if name == "up" else {}
            if name in layer.biases and (self._weights.adds or name == "qkv"):
                bias = layer.biases[name]
                extra["bias"] = onednn.memory(onednn.layout_of(bias), bias)
            found.append(onednn.call(kernel, x, layer.products[name], y, **extra))
        return found

    def norm(self) -> None:
        """Write the RMSNorm of ``x``, without its constant factor, to ``n``."""
        row_sums(self.x, self._sums)
        np.add(self._sums, self._weights.eps, out=self._sums)
        np.sqrt(self._sums, out=self._sums)
        np.divide(self.x, self._sum_column, out=self.n)

    def norm_heads(self, weight: Floats) -> None:
        """Norm each query and key, in place."""
        row_sums(self.qk, self._head_sums)
        np.add(self._head_sums, self._weights.head_eps, out=self._head_sums)
        np.sqrt(self._head_sums, out=self._head_sums)
        np.divide(self.qk, self._head_sum_column, out=self.qk)
        np.multiply(self.qk, weight, out=self.qk)


class Head:
    """The product with the head for a class of rows."""

    def __init__(self, weights: PackedWeights, rows: int) -> None:
        onednn, kernel = weights.onednn, weights.kernel("head", rows)
        self._onednn, self._n = onednn, aligned(rows, weights.config.hidden_size)
        self._shape = rows, weights.vocabulary
        self._result = onednn.memory(onednn.layout(self._shape, (weights.vocabulary, 1)), aligned(1))
        self._call = onednn.call(kernel, onednn.memory(onednn.layout_of(self._n), self._n), weights.head, self._result)

    def __call__(self, normed: Floats) -> Floats:
        """Return the logits of at most so many rows, in an array of their own."""
        logits = np.empty(self._shape, np.float32)
        self._n[: len(normed)] = normed
        self._onednn.move(self._result, logits)
        self._onednn.check(self._onednn.execute(*self._call))
        return logits[: len(normed)]


class Attention:
    """Softmax attention of a class of rows, each of ``queries`` tokens, over ``keys`` positions.

    ``cached`` is ``[2 * rows * kv_heads, keys, head_dim]``, keys before values; ``mask`` ``[rows, heads, queries,
    keys]``, of one row only the heads of one group.
    """

    def __init__(self, weights: PackedWeights, rows: int, queries: int, keys: int, room: Room) -> None:
        onednn, count, width = weights.onednn, rows * weights.kv_heads, weights.width
        group = weights.heads // weights.kv_heads
        self.rows, self.queries, self._onednn, self._at = rows, queries, onednn, (0, 0)
        self.cached, scores, mask = room.arrays(
            (2 * count, keys, width),
            (count, group * queries, keys),
            (1 if rows == 1 else count, group * queries, keys),
        )
        self.mask = mask.reshape(rows, -1, queries, keys)
        key, value = self.cached[:count].transpose(0, 2, 1), self.cached[count:]
        by_group = onednn.layout((count, group * queries, width), (group * queries * width, width, 1))
        of_scores, of_mask = onednn.layout_of(scores), onednn.layout_of(mask)
        of_key, of_value = onednn.layout_of(key), onednn.layout_of(value)
        first = onednn.product(by_group, of_key, of_scores, ["add"], of_mask)
        second = onednn.product(of_scores, of_value, by_group)
        self._query, self._result = (onednn.memory(by_group, aligned(1)) for _ in range(2))
        inside = onednn.memory(of_scores, scores)
        self.calls = (
            onednn.call(first, self._query, onednn.memory(of_key, key), inside, end0=onednn.memory(of_mask, mask)),
            onednn.call(onednn.softmax(of_scores, 2), inside, None, inside),
            onednn.call(second, inside, onednn.memory(of_value, value), self._result),
        )

    def place(self, queries: Floats, results: Floats) -> None:
        """Let the calls read and write these arrays, ``[rows, heads, queries, head_dim]``. The caller keeps them."""
        at = queries.ctypes.data, results.ctypes.data
        if at != self._at:
            self._onednn.move(self._query, queries)
            self._onednn.move(self._result, results)
            self._at = at
