"""A policy small enough to enumerate every answer: the exact gradient of an objective, and of what it stands for.

Each prompt has a table of logits by place and token before. An answer ends with the token END or after LENGTH tokens, so
its length varies. All answers of a prompt are rows of one tensor; expectations are sums over the rows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_TOKENS = 4
END = 0
LENGTH = 6
NUM_PROMPTS = 6
START = NUM_TOKENS
"""The token before the first."""


@dataclass(frozen=True)
class Answers:
    """Every possible answer, [Y, LENGTH]; tokens behind the end are END and not in the mask."""

    tokens_YL: Tensor
    mask_YL: Tensor

    @property
    def num_tokens_Y(self) -> Tensor:
        return self.mask_YL.sum(dim=1).double()


def all_answers() -> Answers:
    """Enumerate the answers of 1 to LENGTH tokens that have END only at their end."""
    rows = []
    words = [token for token in range(NUM_TOKENS) if token != END]
    for length in range(LENGTH + 1):
        for body in itertools.product(words, repeat=length):
            rows.append([*body, END] if length < LENGTH else list(body))
    tokens_YL = torch.tensor([row + [END] * (LENGTH - len(row)) for row in rows])
    mask_YL = torch.tensor([[place < len(row) for place in range(LENGTH)] for row in rows])
    return Answers(tokens_YL, mask_YL)


def rewards(answers: Answers, seed: int) -> Tensor:
    """Return R [P, Y] in [0, 1]: the share of places that agree with the prompt's own right answer of LENGTH tokens."""
    generator = torch.Generator().manual_seed(seed)
    right_PL = torch.randint(1, NUM_TOKENS, (NUM_PROMPTS, LENGTH), generator=generator)
    agrees_PYL = (answers.tokens_YL[None] == right_PL[:, None]) & answers.mask_YL[None]
    return agrees_PYL.double().mean(dim=2)


def start_table(seed: int, spread: float = 0.5) -> Tensor:
    """Return logits [P, LENGTH, NUM_TOKENS + 1, NUM_TOKENS], by prompt, place and token before."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_PROMPTS, LENGTH, NUM_TOKENS + 1, NUM_TOKENS)
    return spread * torch.randn(shape, generator=generator, dtype=torch.float64)


def token_logprobs(table: Tensor, answers: Answers) -> Tensor:
    """Return log pi(y_t | y_<t) [P, Y, LENGTH]; 0 off the mask."""
    before_YL = torch.cat([torch.full_like(answers.tokens_YL[:, :1], START), answers.tokens_YL[:, :-1]], dim=1)
    places_L = torch.arange(LENGTH)
    chosen_PYL = table.log_softmax(dim=-1)[:, places_L, before_YL, answers.tokens_YL]
    return torch.where(answers.mask_YL, chosen_PYL, 0.0)


def probabilities(table: Tensor, answers: Answers) -> Tensor:
    """Return pi(y | prompt) [P, Y]."""
    return token_logprobs(table, answers).sum(dim=2).exp()


def standard_advantages(probabilities_PY: Tensor, rewards_PY: Tensor) -> Tensor:
    """Return (R - mean) / deviation under the answers' own probabilities, [P, Y]: those of an endless group."""
    mean_P = (probabilities_PY * rewards_PY).sum(dim=1, keepdim=True)
    variance_P = (probabilities_PY * (rewards_PY - mean_P).square()).sum(dim=1, keepdim=True)
    return (rewards_PY - mean_P) / (variance_P.sqrt() + 1e-6)


def true_gradient(table: Tensor, answers: Answers, rewards_PY: Tensor) -> Tensor:
    """Return the gradient that on-policy GSPO would follow: E_pi[A / n * grad log pi(y)], flat."""
    leaf = table.detach().clone().requires_grad_()
    logprobs_PYL = token_logprobs(leaf, answers)
    pi_PY = logprobs_PYL.detach().sum(dim=2).exp()
    weight_PY = pi_PY * standard_advantages(pi_PY, rewards_PY) / answers.num_tokens_Y
    (gradient,) = torch.autograd.grad((weight_PY * logprobs_PYL.sum(dim=2)).sum() / NUM_PROMPTS, leaf)
    return gradient.flatten()
