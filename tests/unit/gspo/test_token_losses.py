"""The losses of Tinker's API, against their formulas written down in plain PyTorch."""

import pytest
import torch

from gspo.token_loss_names import GIVEN
from gspo.token_losses import token_loss

SHAPES = [1, 2, 7, 64]


def drawn(n: int, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs around those of the sampler, so that ratios lie on both sides of every bound; some tokens not sampled."""
    random = torch.Generator().manual_seed(100 * seed + n)
    mu = -torch.rand(n, generator=random, dtype=torch.float64) * 3
    logp = (mu + torch.randn(n, generator=random, dtype=torch.float64) * 0.8).clamp(max=-1e-3)
    advantages = torch.randn(n, generator=random, dtype=torch.float64)
    prompt = torch.rand(n, generator=random) < 0.3
    return logp, {"logprobs": mu.masked_fill(prompt, 0.0), "advantages": advantages.masked_fill(prompt, 0.0)}


def by_hand(name: str, logp: torch.Tensor, given: dict[str, torch.Tensor], low: float, high: float, beta: float):
    mu, advantages = given["logprobs"], given["advantages"]
    ratio = torch.exp(logp - mu)
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "ppo":
        return -torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages).sum()
    if name == "cispo":
        return -(torch.clamp(ratio, low, high).detach() * logp * advantages).sum()
    if name == "dro":
        return -(logp * advantages - 0.5 * beta * (logp - mu) ** 2).sum()
    mask = given.get("sequence_ratio_mask", (mu != 0).double())
    log_s = ((logp - mu) * mask).sum() / mask.sum() if mask.sum() else torch.zeros((), dtype=logp.dtype)
    s = torch.exp(log_s).detach() * torch.exp(logp) / torch.exp(logp).detach()
    return -torch.min(s * advantages, torch.clamp(s, low, high) * advantages).sum()


def compare(name: str, logp: torch.Tensor, given, options, low: float, high: float, beta: float) -> None:
    own, other = (logp.clone().requires_grad_() for _ in range(2))
    loss, expected = token_loss(name, own, given, options), by_hand(name, other, given, low, high, beta)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", SHAPES)
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("importance_sampling", 0, 0), ("ppo", 0.8, 1.2), ("cispo", 0.0, 4.0), ("dro", 0, 0), ("gspo", 1 - 3e-4, 1 + 4e-4)],
)
def test_losses_and_gradients_are_those_of_the_formulas(name: str, low: float, high: float, n: int) -> None:
    for seed in range(5):
        compare(name, *drawn(n, seed), {}, low, high, 0.05)


@pytest.mark.parametrize("n", SHAPES)
@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_bounds_come_from_the_options_or_from_each_token(name: str, n: int) -> None:
    logp, given = drawn(n, 9)
    compare(name, logp, given, {"clip_low_threshold": 0.6, "clip_high_threshold": 1.05}, 0.6, 1.05, 0)
    by_token = {"clip_low_threshold": torch.full_like(logp, 0.6), "clip_high_threshold": torch.full_like(logp, 1.05)}
    loss = token_loss(name, logp, given | by_token)
    torch.testing.assert_close(loss, by_hand(name, logp, given, 0.6, 1.05, 0), rtol=0, atol=1e-6)


def test_beta_weighs_the_distance_and_a_mask_chooses_the_tokens_of_the_mean() -> None:
    logp, given = drawn(7)
    compare("dro", logp, given, {"beta": 0.7}, 0, 0, 0.7)
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0], dtype=torch.float64)
    compare("gspo", logp, given | {"sequence_ratio_mask": mask}, {"clip_low_threshold": 0.0}, 0.0, 1 + 4e-4, 0)
    compare("gspo", logp, given | {"sequence_ratio_mask": mask * 0}, {}, 1 - 3e-4, 1 + 4e-4, 0)


@pytest.mark.parametrize("shape", [(1,), (5,), (5, 3), (1, 40)])
def test_cross_entropy_takes_a_weight_for_each_of_several_targets(shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(1)
    logp = -torch.rand(shape, generator=random)
    weights = torch.randn(shape, generator=random)
    own = logp.clone().requires_grad_()
    loss = token_loss("cross_entropy", own, {"weights": weights})
    loss.backward()
    torch.testing.assert_close(loss, -(weights * logp).sum(), rtol=0, atol=1e-6)
    torch.testing.assert_close(own.grad, -weights)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_token_without_advantage_adds_nothing_however_far_its_log_probs_are(name: str) -> None:
    logp, given = drawn(7, 3)
    mask = torch.ones_like(logp)
    far = {key: torch.cat([value, value.new_tensor([value_far])]) for (key, value), value_far in
           zip(given.items(), (-1e6, 0.0), strict=True)}  # fmt: skip
    masks = [{"sequence_ratio_mask": each} for each in (mask, torch.cat([mask, mask.new_zeros(1)]))]
    own = torch.cat([logp, logp.new_tensor([-0.5])]).requires_grad_()
    loss = token_loss(name, own, far | (masks[1] if name == "gspo" else {}))
    loss.backward()
    torch.testing.assert_close(loss.detach(), token_loss(name, logp, given | (masks[0] if name == "gspo" else {})))
    assert own.grad is not None
    assert own.grad[-1] == 0


@pytest.mark.parametrize(
    ("name", "given", "options", "said"),
    [
        ("stable_reinforce", {}, {}, "its formula is not public; choose one by the argument loss_fn of: cross_entropy, "),
        ("reinforce", {}, {}, "loss_fn is 'reinforce': choose one"),
        ("ppo", {}, {}, "ppo needs logprobs, advantages, and logprobs was not given"),
        ("cross_entropy", {"weights": torch.ones(3)}, {}, r"weights is \[3\]; it must be \[2\]"),
        ("ppo", {}, {"beta": 1.0}, "loss_fn_config has 'beta', which ppo does not; it has clip_low_threshold, "),
        ("dro", {}, {"beta": float("nan")}, "beta is nan; give a finite number"),
        ("ppo", {}, {"clip_low_threshold": 1.3}, "clip_low_threshold is 1.3 and clip_high_threshold is 1.2"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_the_way_out(name, given, options, said) -> None:
    with pytest.raises(ValueError, match=said):
        token_loss(name, torch.zeros(2), given, options)


def test_every_loss_is_compared_above() -> None:
    assert set(GIVEN) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"}
