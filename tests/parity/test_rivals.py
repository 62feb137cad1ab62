"""The rivals of the clip against those who have them too: TRL's trainer, and the loss functions of verl.

Run by ``make test-parity``. Each side has its own float64 gradients of the same random batches.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo import Objective, objective_loss
from tests.parity.batch import PaddedBatch, random_batch

pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def their_numbers_in_float64() -> Iterator[None]:
    """torch.where of two Python numbers, as TRL writes SAPO's temperatures, has the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


TheirLoss = Callable[[Tensor, PaddedBatch], Tensor]


def agree(objective: Objective, their_loss: TheirLoss, *, spread: float, num_seeds: int = 100) -> None:
    """Both have the same loss and gradient; some tokens are within the bounds of ``objective``, and some are not."""
    taken = tokens = 0.0
    for seed in range(num_seeds):
        batch = random_batch(seed, spread=spread, dtype=torch.float64)
        if not bool(batch.mask_T.any()):
            continue
        theirs_SL = batch.logprobs_SL.clone().requires_grad_()
        theirs = their_loss(theirs_SL, batch)
        theirs.backward()  # type: ignore[no-untyped-call]
        ours_T = batch.logprobs_SL.reshape(-1).clone().requires_grad_()
        output = objective_loss(
            objective,
            ours_T,
            batch.anchor_SL.reshape(-1),
            batch.advantages_T,
            batch.mask_T,
            batch.sequence_ids_T,
            num_sequences=batch.advantages_S.shape[0],
            lag_S=batch.advantages_S.new_zeros(batch.advantages_S.shape[0]),
            num_tokens=int(batch.mask_T.sum()) if objective.aggregation == "token" else None,
        )
        output.loss.backward()  # type: ignore[no-untyped-call]
        assert output.loss.item() == pytest.approx(theirs.item(), rel=1e-12, abs=1e-14), f"seed {seed}"
        assert theirs_SL.grad is not None
        torch.testing.assert_close(ours_T.grad, theirs_SL.grad.reshape(-1), rtol=1e-11, atol=1e-14, msg=f"seed {seed}")
        stats = output.stats
        taken += float(((stats.clipped_high_S + stats.clipped_low_S) * stats.num_tokens_S).sum())
        tokens += float(stats.num_tokens_S.sum())
    assert 0.02 < taken / tokens < 0.9


TRL: dict[str, tuple[Objective, dict[str, Any], float]] = {
    # The cap is lowered so that ratios of these batches reach it.
    "cispo": (replace(Objective.cispo(), cispo_cap=1.3), {"level": "token", "eps_low": 0.2, "eps_high": 1.3}, 0.25),
    "sapo": (Objective.sapo(), {"level": "token", "eps_low": 0.2, "eps_high": 0.2}, 0.6),
    "vespo": (Objective.vespo(), {"level": "token", "eps_low": 0.2, "eps_high": 0.2}, 0.1),
    "luspo": (Objective.luspo(), {"level": "sequence", "eps_low": 2e-3, "eps_high": 2.5e-3}, 3e-3),
}


@pytest.mark.parametrize("rival", TRL)
def test_the_loss_and_its_gradient_are_trls(rival: str, tmp_path: Path) -> None:
    from tests.parity.trl_loss import build_trainer, loss_of_given

    objective, settings, spread = TRL[rival]
    trainer = build_trainer(tmp_path, loss_type=rival, **settings)
    agree(objective, lambda logprobs, batch: loss_of_given(trainer, logprobs, batch, batch.advantages_S), spread=spread)


def test_gmpo_is_trls(tmp_path: Path) -> None:
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    from tests.parity.trl_loss import build_trainer, loss_of_given

    # TRL's epsilon is the bound of the logarithm.
    trainer = build_trainer(tmp_path, level="token", eps_low=0.4, eps_high=0.4, of=(GMPOTrainer, GMPOConfig))

    def without_empty_rows(logprobs_SL: Tensor, batch: PaddedBatch) -> Tensor:
        """TRL gives a row without tokens the ratio 1, and here it has no term."""
        empty_S = ~(batch.inside_SL & batch.action_SL).any(dim=1)
        return loss_of_given(trainer, logprobs_SL, batch, batch.advantages_S) + (batch.advantages_S * empty_S).mean()

    agree(Objective.gmpo(), without_empty_rows, spread=0.4)


def test_sapo_has_the_temperatures_that_trl_takes_unless_told(tmp_path: Path) -> None:
    from trl import GRPOConfig

    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    sapo = Objective.sapo()
    assert (config.sapo_temperature_pos, config.sapo_temperature_neg) == (sapo.sapo_tau_positive, sapo.sapo_tau_negative)


def verl_loss(name: str, **config: Any) -> TheirLoss:
    """One function of verl's core_algos.py, without the package around it, which would load ray; a mean over tokens."""
    found = importlib.util.find_spec("verl")
    assert found is not None
    assert found.origin is not None
    tree = ast.parse((Path(found.origin).parent / "trainer" / "ppo" / "core_algos.py").read_text(encoding="utf-8"))
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    function.decorator_list, function.returns = [], None
    for argument in function.args.args:
        argument.annotation = None

    def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
        return (values * mask).sum() / mask.sum()

    class Config(SimpleNamespace):
        def get(self, key: str, default: Any) -> Any:
            return getattr(self, key, default)

    names: dict[str, Any] = {
        "torch": torch,
        "verl_F": SimpleNamespace(masked_mean=masked_mean),
        "agg_loss": lambda loss_mat, loss_mask, loss_agg_mode: masked_mean(loss_mat, loss_mask),
        "ActorConfig": Config,
        "AlgoConfig": int,
    }
    exec(compile(ast.Module([function], []), "core_algos.py", "exec"), names)
    wanted = Config(**config, global_batch_info={})

    def loss(logprobs_SL: Tensor, batch: PaddedBatch) -> Tensor:
        advantages_SL = batch.advantages_S[:, None].expand(logprobs_SL.shape)
        mask_SL = (batch.inside_SL & batch.action_SL).double()
        value: Tensor = names[name](batch.anchor_SL, logprobs_SL, advantages_SL, mask_SL, config=wanted)[0]
        return value

    return loss


def test_cispo_and_the_mask_of_dppo_are_verls() -> None:
    bounds = {"clip_ratio": 0.3, "clip_ratio_low": 10.0, "clip_ratio_high": 0.3}
    cispo = replace(Objective.cispo(), cispo_cap=1.3)
    agree(cispo, verl_loss("compute_policy_loss_cispo", **bounds), spread=0.25)
    dppo = Objective(surrogate="dppo", ratio_unit="token", aggregation="token", dppo_cap=1.4)
    values = {"clip_ratio": 0.15, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 1.4}
    gradient_only(dppo, verl_loss("compute_policy_loss_dppo_tv", **values), spread=0.4)


def gradient_only(objective: Objective, their_loss: TheirLoss, *, spread: float) -> None:
    """verl writes sg[r] log pi for a term whose value is r here: the value differs, and the gradient is the same."""

    def with_our_value(logprobs_SL: Tensor, batch: PaddedBatch) -> Tensor:
        theirs = their_loss(logprobs_SL, batch)
        ours = objective_loss(
            objective,
            batch.logprobs_SL.reshape(-1),
            batch.anchor_SL.reshape(-1),
            batch.advantages_T,
            batch.mask_T,
            batch.sequence_ids_T,
            num_sequences=batch.advantages_S.shape[0],
            num_tokens=int(batch.mask_T.sum()),
        )
        return theirs - theirs.detach() + ours.loss.detach()

    agree(objective, with_our_value, spread=spread)
