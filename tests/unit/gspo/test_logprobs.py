"""Chunked log-probabilities against a float64 log_softmax."""

from __future__ import annotations

import pytest
import torch

from gspo.logprobs import chunked_logprobs


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_chunked_logprobs_and_gradients_equal_log_softmax(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(11, 8, generator=generator)
    weight = torch.randn(23, 8, generator=generator)
    targets = torch.randint(0, 23, (11,), generator=generator)
    temperatures = torch.rand(11, generator=generator) + 0.5
    upstream = torch.randn(11, generator=generator)

    hidden_a, weight_a = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    result = chunked_logprobs(hidden_a, weight_a, targets, temperatures, chunk_tokens=chunk_tokens, with_entropy=True)
    (result.logprobs_T * upstream).sum().backward()

    hidden_b, weight_b = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_softmax = torch.log_softmax(hidden_b @ weight_b.t() / temperatures[:, None], dim=-1)
    expected = log_softmax.gather(-1, targets[:, None]).squeeze(-1)
    (expected * upstream).sum().backward()

    assert result.logprobs_T.dtype == torch.float32
    torch.testing.assert_close(result.logprobs_T.double(), expected, rtol=1e-5, atol=1e-5)
    assert hidden_a.grad is not None
    assert weight_a.grad is not None
    torch.testing.assert_close(hidden_a.grad.double(), hidden_b.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight_a.grad.double(), weight_b.grad, rtol=1e-4, atol=1e-5)
    assert result.entropies_T is not None
    assert not result.entropies_T.requires_grad
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    torch.testing.assert_close(result.entropies_T.double(), entropy.detach(), rtol=1e-5, atol=1e-5)


def test_entropy_is_absent_unless_asked_for() -> None:
    result = chunked_logprobs(torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 4]), torch.ones(2), chunk_tokens=8)
    assert result.entropies_T is None
    torch.testing.assert_close(result.logprobs_T, torch.full((2,), 0.2).log())


def test_bfloat16_hidden_states_give_float32_logprobs_and_bfloat16_gradients() -> None:
    hidden = torch.randn(5, 8, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(9, 8, dtype=torch.bfloat16).requires_grad_()
    result = chunked_logprobs(hidden, weight, torch.arange(5), torch.ones(5), chunk_tokens=2)
    result.logprobs_T.sum().backward()
    assert result.logprobs_T.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
