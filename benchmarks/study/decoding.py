"""Decodes answers of several versions of one small model at once: an inference engine for many weights, in torch.

A batch of the study has up to nine versions of a model of a quarter of a million parameters. One after the other, most of
the time goes into the calls. Here the weights of all versions are stacked, and each operation is one for all.

In bfloat16 each operation's operands and result are rounded to bfloat16 and the sum inside is float32, as an engine's. In
FP8 the operands of the projections and of the experts are (benchmarks/fp8/emulation.py), and all else is float32.

Shapes: K blocks of R rows each, all rows of a block under one version; T new tokens, S tokens in the cache, V in the
vocabulary, N rows or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import silu
from transformers import Qwen3MoeConfig

from benchmarks.fp8.emulation import rounded

COMPACT = 0.75
"""Blocks whose rows have all ended leave once at most this part of the blocks is left: their weights are copied then."""


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt, with the log-probs of its tokens."""

    ids: list[int]
    logprobs: list[float]
    experts: list[NDArray[np.int16]] = field(default_factory=list)
    """[layers, k] for each token: the experts of the pass that it was drawn from, as an engine reports them (R3)."""


@dataclass(frozen=True)
class Order:
    """Prompts to answer with one version's weights (a state dict of a Qwen3MoeForCausalLM)."""

    weights: Mapping[str, Tensor]
    prompts: Sequence[list[int]]
    seed: int
    """Of these answers' randomness."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Answers orders at temperature 1, up to and including the end marker."""

    config: Qwen3MoeConfig
    bf16: bool = False
    fp8: bool = False
    pad_id: int
    end_id: int

    def __post_init__(self) -> None:
        config = self.config
        if not (config.norm_topk_prob and config.hidden_act == "silu" and not config.mlp_only_layers):
            raise ValueError("the decoder knows Qwen3-MoE with normalised router weights, SiLU and experts in each layer")

    @torch.no_grad()
    def decode(self, orders: Sequence[Order], max_new_tokens: int) -> list[list[Answer]]:
        """The answers of each order, in the order of its prompts."""
        rows = gcd(*(len(order.prompts) for order in orders))
        return _Decoding(self, orders, rows, max_new_tokens).run()


class _Decoding:
    """One call of ``decode``."""

    def __init__(self, decoder: Decoder, orders: Sequence[Order], rows: int, max_new_tokens: int) -> None:
        self._config = config = decoder.config
        self._end_id = decoder.end_id
        self._bf16, self._fp8 = decoder.bf16, decoder.fp8
        self._max_new_tokens = max_new_tokens
        self._answers = [[Answer([], []) for _ in order.prompts] for order in orders]
        self._generators = [torch.Generator().manual_seed(order.seed) for order in orders]
        self._blocks = [
            (number, first) for number, order in enumerate(orders) for first in range(0, len(order.prompts), rows)
        ]
        """Each block's order, and the first of its rows among that order's prompts."""
        self._order_K = torch.tensor([number for number, _ in self._blocks])
        self._weights = {
            name: self._round(torch.stack([self._stored(name, order.weights[name]) for order in orders]))[self._order_K]
            for name in orders[0].weights
        }
        prompts = [prompt for order in orders for prompt in order.prompts]
        length = max(map(len, prompts))
        shape = (len(self._blocks), rows, length)
        self._ids_KRT = torch.tensor([[decoder.pad_id] * (length - len(each)) + each for each in prompts]).view(shape)
        self._is_token_KRS = torch.tensor([[False] * (length - len(each)) + [True] * len(each) for each in prompts]).view(
            shape
        )
        self._positions_KRT = (self._is_token_KRS.long().cumsum(-1) - 1).clamp(min=0)
        heads = (config.num_key_value_heads, length + max_new_tokens, config.head_dim)
        self._cache = [
            [torch.zeros(*shape[:2], *heads) for _ in ("keys", "values")] for _ in range(config.num_hidden_layers)
        ]
        self._alive_KR = torch.ones(shape[:2], dtype=torch.bool)
        self._chosen_KRK: list[Tensor] = []
        """Of each layer, the experts of the last pass's newest tokens."""
        self._frequencies_D = config.rope_parameters["rope_theta"] ** -(
            torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        )

    def run(self) -> list[list[Answer]]:
        for _ in range(self._max_new_tokens):
            logprobs_KRV = self._forward()
            next_KR = self._sample(logprobs_KRV)
            self._alive_KR &= next_KR != self._end_id
            if not self._alive_KR.any():
                break
            self._ids_KRT = next_KR[:, :, None]
            self._is_token_KRS = torch.cat([self._is_token_KRS, torch.ones_like(self._ids_KRT, dtype=torch.bool)], dim=-1)
            self._positions_KRT = self._positions_KRT[:, :, -1:] + 1
            self._compact()
        return self._answers

    def _sample(self, logprobs_KRV: Tensor) -> Tensor:
        """Draw each living row's next token, with its order's randomness; rows that have ended get the end marker."""
        next_KR = torch.full(self._alive_KR.shape, self._end_id)
        chosen_KRLK = torch.stack(self._chosen_KRK, dim=2).to(torch.int16)
        for number, generator in enumerate(self._generators):
            chosen_KR = self._alive_KR & (self._order_K == number)[:, None]
            if not chosen_KR.any():
                continue
            logprobs_NV = logprobs_KRV[chosen_KR]
            next_N1 = torch.multinomial(logprobs_NV.exp(), 1, generator=generator)
            next_KR[chosen_KR] = next_N1[:, 0]
            places, tokens = chosen_KR.nonzero().tolist(), next_N1[:, 0].tolist()
            experts_NLK = chosen_KRLK[chosen_KR].numpy()
            for (block, row), token, logprob, experts_LK in zip(
                places, tokens, logprobs_NV.gather(1, next_N1)[:, 0].tolist(), experts_NLK, strict=True
            ):
                answer = self._answers[number][self._blocks[block][1] + row]
                answer.ids.append(token)
                answer.logprobs.append(logprob)
                answer.experts.append(experts_LK)
        return next_KR

    def _compact(self) -> None:
        lives_K = self._alive_KR.any(dim=1)
        if int(lives_K.sum()) > COMPACT * len(self._blocks):
            return
        self._blocks = [block for block, lives in zip(self._blocks, lives_K.tolist(), strict=True) if lives]
        self._weights = {name: tensor[lives_K] for name, tensor in self._weights.items()}
        self._cache = [[tensor[lives_K] for tensor in layer] for layer in self._cache]
        self._order_K = self._order_K[lives_K]
        self._alive_KR, self._ids_KRT = self._alive_KR[lives_K], self._ids_KRT[lives_K]
        self._is_token_KRS, self._positions_KRT = self._is_token_KRS[lives_K], self._positions_KRT[lives_K]

    # --- the model ------------------------------------------------------------------------------------------------------

    def _forward(self) -> Tensor:
        """The log-probs of each row's next token, float32 [K, R, V]. The cache grows by the new tokens."""
        num_blocks = len(self._blocks)
        self._chosen_KRK = []
        embedding_KVH = self._weights["model.embed_tokens.weight"]
        x_KRTH = embedding_KVH[torch.arange(num_blocks)[:, None, None], self._ids_KRT]
        angles_KRTD = self._positions_KRT[..., None].float() * self._frequencies_D
        angles_KRTD = torch.cat([angles_KRTD, angles_KRTD], dim=-1)
        turn = self._round(angles_KRTD.cos()), self._round(angles_KRTD.sin())
        num_new, num_seen = x_KRTH.shape[2], self._is_token_KRS.shape[-1]
        causal_TS = torch.ones(num_new, num_seen, dtype=torch.bool).tril(num_seen - num_new)
        # A pad sees itself, so that no row of the softmax is empty.
        itself_TS = torch.eye(num_new, num_seen, dtype=torch.bool).roll(num_seen - num_new, dims=1)
        visible_KRTS = (self._is_token_KRS[:, :, None, :] & causal_TS) | itself_TS
        for layer in range(self._config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            attended_KRTH = self._attention(layer, self._norm(x_KRTH, prefix + "input_layernorm.weight"), turn, visible_KRTS)
            x_KRTH = self._round(x_KRTH + attended_KRTH)
            x_KRTH = self._round(
                x_KRTH + self._experts(prefix, self._norm(x_KRTH, prefix + "post_attention_layernorm.weight"))
            )
        last_KRH = self._norm(x_KRTH[:, :, -1], "model.norm.weight")
        return self._linear(last_KRH, "lm_head.weight").log_softmax(dim=-1)

    def _attention(self, layer: int, x_KRTH: Tensor, turn: tuple[Tensor, Tensor], visible_KRTS: Tensor) -> Tensor:
        config, prefix = self._config, f"model.layers.{layer}.self_attn."
        heads = (*x_KRTH.shape[:3], -1, config.head_dim)
        q, k, v = (self._linear(x_KRTH, f"{prefix}{name}_proj.weight").view(heads).transpose(2, 3) for name in "qkv")
        q, k = self._norm(q, prefix + "q_norm.weight"), self._norm(k, prefix + "k_norm.weight")
        q, k = self._turned(q, turn), self._turned(k, turn)
        end = visible_KRTS.shape[-1]
        keys, values = self._cache[layer]
        keys[:, :, :, end - k.shape[3] : end], values[:, :, :, end - v.shape[3] : end] = k, v
        groups = config.num_attention_heads // config.num_key_value_heads
        q = q.unflatten(2, (config.num_key_value_heads, groups))
        scores = q @ keys[:, :, :, None, :end].transpose(-1, -2) * config.head_dim**-0.5
        shares = scores.masked_fill(~visible_KRTS[:, :, None, None], -torch.inf).softmax(dim=-1)
        out = self._round(shares @ values[:, :, :, None, :end]).flatten(2, 3).transpose(2, 3).flatten(3)
        return self._linear(out, prefix + "o_proj.weight")

    def _turned(self, x_KRATD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Rotary positions."""
        cos, sin = (each[:, :, None] for each in turn)
        first, second = x_KRATD.chunk(2, dim=-1)
        return self._round(self._round(x_KRATD * cos) + self._round(torch.cat([-second, first], dim=-1) * sin))

    def _experts(self, prefix: str, x_KRTH: Tensor) -> Tensor:
        """Every expert on every token, of which the chosen ones count: for so small a model that is cheaper than to sort."""
        config = self._config
        shares = self._linear(x_KRTH, prefix + "mlp.gate.weight").softmax(dim=-1)
        top, chosen = shares.topk(config.num_experts_per_tok, dim=-1)
        self._chosen_KRK.append(chosen[:, :, -1])
        shares_KRTE = torch.zeros_like(shares).scatter(-1, chosen, self._round(top / top.sum(dim=-1, keepdim=True)))
        gate_up_KEIH = self._weights[prefix + "mlp.experts.gate_up_proj"]
        num_blocks, num_experts = gate_up_KEIH.shape[:2]
        x_KNH = self._entering(x_KRTH.flatten(1, 2))
        gate, up = (
            self._round(torch.bmm(x_KNH, gate_up_KEIH.flatten(1, 2).transpose(1, 2)))
            .unflatten(2, (num_experts, -1))
            .chunk(2, dim=-1)
        )
        inner_BNI = self._entering(self._round(self._round(silu(gate)) * up).transpose(1, 2).flatten(0, 1))
        down_BHI = self._weights[prefix + "mlp.experts.down_proj"].flatten(0, 1)
        out_KENH = self._round(torch.bmm(inner_BNI, down_BHI.transpose(1, 2))).unflatten(0, (num_blocks, num_experts))
        weighted_KENH = self._round(out_KENH * shares_KRTE.flatten(1, 2).transpose(1, 2)[..., None])
        return self._round(weighted_KENH.sum(dim=1)).view_as(x_KRTH)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dimension; the first one is that of the blocks."""
        weight = self._weights[name].view(-1, *[1] * (x.ndim - 2), x.shape[-1])
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._config.rms_norm_eps)
        return self._round(weight * self._round(x * scale))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        flat_KNI = x.flatten(1, -2)
        if name.endswith("_proj.weight"):
            flat_KNI = self._entering(flat_KNI)
        out_KNO = torch.bmm(flat_KNI, self._weights[name].transpose(1, 2))
        return self._round(out_KNO).view(*x.shape[:-1], -1)

    def _stored(self, name: str, weight: Tensor) -> Tensor:
        """A weight as the engine has it."""
        return rounded(weight) if self._fp8 and name.endswith(("_proj.weight", "_proj")) else weight

    def _entering(self, x: Tensor) -> Tensor:
        """What enters a projection or an expert."""
        return rounded(x, rows=1) if self._fp8 else x

    def _round(self, x: Tensor) -> Tensor:
        return x.bfloat16().float() if self._bf16 else x
