"""Attention that is not that of ``ModelShape``: over compressed keys, or linear with a state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): its ranks, and the parts of a head."""

    q_rank: int
    """0: queries are not compressed."""
    kv_rank: int
    nope: int
    """Of queries and keys, without positions."""
    rope: int
    """The same with positions."""
    value: int

    @property
    def head_width(self) -> int:
        """What costs in attention as much as a head of keys and one of values of this size."""
        return (self.nope + self.rope + self.value) // 2

    def sides(self, hidden: int, heads: int) -> int:
        """Rows and columns of all matrices of one layer."""
        queries = heads * (self.nope + self.rope)
        of_queries = hidden + 2 * self.q_rank + queries if self.q_rank else hidden + queries
        of_keys = hidden + self.kv_rank + self.rope + self.kv_rank + heads * (self.nope + self.value)
        return of_queries + of_keys + heads * self.value + hidden

    def kept(self, heads: int) -> int:
        """Elements that autograd keeps of one layer for one token: queries, keys, values and results as wide as keys, as the
        kernel has them, and the narrower results that are projected."""
        return heads * (4 * (self.nope + self.rope) + self.value)

    def parameters(self, hidden: int, heads: int) -> int:
        """Of one layer."""
        queries = heads * (self.nope + self.rope)
        of_queries = self.q_rank * (hidden + 1 + queries) if self.q_rank else hidden * queries
        of_keys = hidden * (self.kv_rank + self.rope) + self.kv_rank * (1 + heads * (self.nope + self.value))
        return of_queries + of_keys + heads * self.value * hidden


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Gated delta rule (arXiv 2412.06464), in some layers in place of attention, as Qwen3-Next and Qwen3.5 have it."""

    layers: int
    """That have it; the others have attention whose result is gated."""
    key_width: int
    """Of all heads of keys together; queries are as wide."""
    value_width: int
    value_heads: int
    kernel: int
    """Tokens that the convolution sees."""

    def parameters(self, hidden: int) -> int:
        """Of one layer: projections of queries, keys, values, their gate and two numbers a head; a convolution; a decay, a
        bias and a norm of heads; the output."""
        inputs = hidden * (2 * self.key_width + 2 * self.value_width + 2 * self.value_heads)
        convolved = self.kernel * (2 * self.key_width + self.value_width)
        own = 2 * self.value_heads + self.value_width // self.value_heads
        return inputs + convolved + own + self.value_width * hidden
