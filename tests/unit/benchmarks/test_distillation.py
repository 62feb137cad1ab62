"""The figure of distillation: its verdict is what was fixed beforehand."""

from benchmarks.distillation import ARMS, REWARD, Curve, table


def curves(**kl: float) -> list[Curve]:
    """One seed more than once would do; the KL of arms that are not named is 0.5."""
    named = {arm: kl.get(arm.replace(" ", "_"), 0.5) for arm in ARMS}
    rewards = [(0, 0.3), (5, 0.8)]
    return [Curve(arm, seed, [value + seed / 100] * 6, rewards) for arm, value in named.items() for seed in (0, 1)]


def test_a_teacher_helps_if_the_kl_is_lower_in_every_seed_with_and_without_reward() -> None:
    said = table(curves(reward_and_teacher=0.4, teacher_alone=0.3))
    assert f"| {REWARD} | 0.500, 0.510 | - | 0.500, 0.510 | 0.80, 0.80 |" in said
    assert "| teacher alone | 0.300, 0.310 | -0.200 (-0.200 to -0.200) | 0.300, 0.310 | 0.80, 0.80 |" in said
    assert said.endswith("A teacher lowers the KL more than reward alone in every seed, with and without reward.")
    one = [curve if (curve.arm, curve.seed) != ("teacher alone", 1) else Curve("teacher alone", 1, [0.51] * 6, [(5, 0.8)])
           for curve in curves(reward_and_teacher=0.4, teacher_alone=0.3)]  # fmt: skip
    assert table(one).endswith("not in every seed: teacher alone.")
