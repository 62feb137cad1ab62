"""Chunked log-probabilities against a float64 log_softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gspo.model.logprobs import CHUNK_BYTES, KEPT_BYTES, chunked_logprobs, chunks, rows_at_once


@pytest.mark.parametrize("kept_bytes", [0, KEPT_BYTES])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_chunked_logprobs_and_gradients_equal_log_softmax(chunk_tokens: int, kept_bytes: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(11, 8, generator=generator)
    weight = torch.randn(23, 8, generator=generator)
    targets = torch.randint(0, 23, (11,), generator=generator)
    temperatures = torch.rand(11, generator=generator) + 0.5
    upstream = torch.randn(11, generator=generator)

    hidden_a, weight_a = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    result = chunked_logprobs(
        hidden_a, weight_a, targets, temperatures, chunk_tokens=chunk_tokens, with_entropy=True, kept_bytes=kept_bytes
    )
    (result.logprobs_T * upstream).sum().backward()

    hidden_b, weight_b = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_softmax = torch.log_softmax(hidden_b @ weight_b.t() / temperatures[:, None], dim=-1)
    expected = log_softmax.gather(-1, targets[:, None]).squeeze(-1)
    (expected * upstream).sum().backward()

    assert result.logprobs_T.dtype == torch.float32
    torch.testing.assert_close(result.logprobs_T.double(), expected, rtol=1e-6, atol=1e-6)
    assert hidden_a.grad is not None
    assert weight_a.grad is not None
    torch.testing.assert_close(hidden_a.grad.double(), hidden_b.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight_a.grad.double(), weight_b.grad, rtol=1e-5, atol=1e-5)
    assert result.entropies_T is not None
    assert not result.entropies_T.requires_grad
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    torch.testing.assert_close(result.entropies_T.double(), entropy.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kept_bytes", [0, KEPT_BYTES])
def test_a_float32_head_rounds_no_logit_of_half_precision_and_without_it_log_probs_are_off(kept_bytes: int) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(40, 64, generator=generator).bfloat16()
    weight = torch.randn(97, 64, generator=generator).bfloat16()
    targets, ones = torch.randint(0, 97, (40,), generator=generator), torch.ones(40)
    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_softmax = torch.log_softmax(exact_hidden @ exact_weight.t(), dim=-1)
    expected = log_softmax.gather(-1, targets[:, None]).squeeze(-1)
    expected.mean().backward()
    off = {}
    for float32 in (False, True):
        states, embedding = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        result = chunked_logprobs(
            states, embedding, targets, ones, chunk_tokens=7, with_entropy=True, kept_bytes=kept_bytes, float32=float32
        )
        result.logprobs_T.mean().backward()
        off[float32] = (result.logprobs_T.double() - expected).abs().max().item()
        for found, right in ((states, exact_hidden), (embedding, exact_weight)):
            assert found.grad is not None
            assert right.grad is not None
            assert (found.grad.double() - right.grad).norm() < 0.02 * right.grad.norm()
    assert off[True] < 2e-5
    assert off[False] > 0.02


class _Shapes(TorchDispatchMode):
    """Collects the shapes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.seen.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_embedding_costs_no_gradient_of_its_size(dtype: torch.dtype) -> None:
    """It is gigabytes of float32, where adapters are trained because memory is short."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(6, 8, generator=generator).to(dtype)
    weight = torch.randn(23, 8, generator=generator).to(dtype)
    gradients = []
    for is_frozen in (False, True):
        states, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not is_frozen)
        result = chunked_logprobs(states, head, torch.arange(6), torch.ones(6), chunk_tokens=4)
        with _Shapes() as shapes:
            result.logprobs_T.sum().backward()
        assert ((23, 8) in shapes.seen) is not is_frozen
        assert (head.grad is None) is is_frozen
        gradients.append(states.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_a_softmax_is_kept_for_backward_only_where_it_is_small() -> None:
    saved: dict[int, list[tuple[int, ...]]] = {8: [], 9: []}
    for rows, shapes in saved.items():
        hidden = torch.ones(rows, 3).requires_grad_()
        targets = torch.zeros(rows, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=shapes: to.append(tuple(x.shape)), lambda x: x):  # type: ignore[misc]
            chunked_logprobs(hidden, torch.ones(5, 3), targets, torch.ones(rows), chunk_tokens=2, kept_bytes=4 * 8 * 5)
    assert (8, 5) in saved[8]
    assert (9, 5) not in saved[9]
    assert (9, 3) in saved[9]


def test_a_chunk_is_bounded_in_rows_and_in_bytes() -> None:
    assert rows_at_once(264, 512, cuda=False) == 512
    assert rows_at_once(151_936, 512, cuda=False) == 441
    assert 4 * 151_936 * 441 <= CHUNK_BYTES[False] < 4 * 151_936 * 442
    assert rows_at_once(2**40, 512, cuda=False) == 1
    assert rows_at_once(151_936, 4096, cuda=True, logit_bytes=2) == 4096
    assert rows_at_once(151_936, 8192, cuda=True, logit_bytes=2) == 4416
    assert rows_at_once(151_936, 4096, cuda=True, logit_bytes=2, free_bytes=2**30) == 1766
    assert rows_at_once(151_936, 4096, cuda=True, logit_bytes=2, free_bytes=0) == 1


@pytest.mark.parametrize(("free_bytes", "rows"), [(2**40, {4}), (2 * 3 * 23 * 8 + 23 * 8 * 8, {3, 2}), (0, {1})])
def test_a_gpu_with_little_free_memory_has_smaller_chunks_of_one_size(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, rows: set[int]
) -> None:
    """8 tokens. The gradient of the weight and its sum do not count as free."""
    of_a_gpu = {"on_gpu": lambda _: True, "_free_bytes": lambda _: free_bytes, "SUMS_IN_FLOAT32": False}
    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randn(size, 8, generator=generator).requires_grad_() for size in (8, 23)]
    found = []
    for is_on_gpu in (False, True):
        for name, value in of_a_gpu.items() if is_on_gpu else ():
            monkeypatch.setattr(chunks, name, value)
        with _Shapes() as shapes:
            result = chunked_logprobs(*leaves, torch.arange(8), torch.ones(8), chunk_tokens=5, fused=False)
            found.append([result.logprobs_T, *torch.autograd.grad(result.logprobs_T.sum(), leaves)])
    assert {shape[0] for shape in shapes.seen if shape[1:] == (23,)} - {8} == rows
    for expected, other in zip(*found, strict=True):
        torch.testing.assert_close(other, expected)


@pytest.mark.parametrize("kept_bytes", [0, KEPT_BYTES])
@pytest.mark.parametrize("tokens", [0, 1])
def test_a_batch_of_one_token_or_none_has_gradients(tokens: int, kept_bytes: int) -> None:
    hidden, weight = torch.ones(tokens, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    result = chunked_logprobs(hidden, weight, targets, torch.ones(tokens), chunk_tokens=8, kept_bytes=kept_bytes)
    of_hidden, of_weight = torch.autograd.grad(result.logprobs_T.sum(), (hidden, weight))
    assert result.logprobs_T.exp().tolist() == pytest.approx([0.2] * tokens)
    torch.testing.assert_close(of_hidden, torch.zeros(tokens, 3))
    torch.testing.assert_close(of_weight, tokens * (torch.tensor([0.8, *[-0.2] * 4])[:, None].expand(5, 3)))


def test_logits_far_from_zero_overflow_nothing() -> None:
    """exp(1000) is infinite in float32."""
    hidden = torch.tensor([[1000.0], [-1000.0]])
    result = chunked_logprobs(
        hidden, torch.tensor([[1.0], [0.0]]), torch.tensor([0, 0]), torch.ones(2), chunk_tokens=8, with_entropy=True
    )
    assert result.logprobs_T.tolist() == [0.0, -1000.0]
    assert result.entropies_T is not None
    assert result.entropies_T.tolist() == [0.0, 0.0]


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


@pytest.mark.parametrize("kept_bytes", [0, 2**20])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 64])
def test_the_gradient_of_the_entropy_equals_that_of_log_softmax(chunk_tokens: int, kept_bytes: int) -> None:
    """One row's logits are far apart, so that most of its probabilities underflow."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(9, 6, generator=generator)
    hidden[3] *= 400
    weight, targets = torch.randn(11, 6, generator=generator), torch.randint(0, 11, (9,), generator=generator)
    temperatures, by_entropy = 0.5 + torch.rand(9, generator=generator), torch.randn(9, generator=generator)
    gradients = []
    for reference in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        if reference:
            logp = torch.log_softmax(leaves[0] @ leaves[1].t() / temperatures[:, None], -1)
            entropies_T, logprobs_T = -(logp.exp() * logp).sum(-1), logp.gather(-1, targets[:, None]).squeeze(-1)
        else:
            result = chunked_logprobs(
                leaves[0],
                leaves[1],
                targets,
                temperatures,
                chunk_tokens=chunk_tokens,
                with_entropy=True,
                entropy_gradient=True,
                kept_bytes=kept_bytes,
            )
            logprobs_T, entropies_T = result.logprobs_T, result.entropies_T
            assert entropies_T is not None
        gradients.append(torch.autograd.grad((logprobs_T + by_entropy * entropies_T).sum(), leaves))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_entropies_carry_a_gradient_on_request_only() -> None:
    for asked in (False, True):
        result = chunked_logprobs(
            torch.ones(2, 3, requires_grad=True),
            torch.ones(5, 3),
            torch.tensor([0, 4]),
            torch.ones(2),
            chunk_tokens=8,
            with_entropy=True,
            entropy_gradient=asked,
        )
        assert result.entropies_T is not None
        assert result.entropies_T.requires_grad is asked
