"""The objective's validation, and that the package can be imported without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any, get_args

import pytest

import gspo
from gspo.settings import Objective, TisMode


def test_the_defaults_are_the_papers_clip_values() -> None:
    objective = Objective()
    assert (objective.ratio_unit, objective.eps_low, objective.eps_high) == ("sequence", 3e-4, 4e-4)
    assert (objective.anchor, objective.weight_mode, objective.noise_z) == ("behaviour", "off", 1.0)
    assert Objective(anchor="proximal").weight_mode == "truncate"


@pytest.mark.parametrize(
    ("settings", "calibrated"),
    [
        ({}, True),
        ({"clip_calibration": "widen"}, True),
        ({"clip_calibration": "off"}, False),
        ({"clip_range_growth": 1.0}, False),
        ({"anchor": "proximal"}, False),
    ],
)
def test_the_clip_range_is_calibrated_unless_something_else_was_asked_for(
    settings: dict[str, Any], calibrated: bool
) -> None:
    assert Objective(**settings).is_calibrated is calibrated
    assert not any(objective.is_calibrated for objective in (Objective.gspo(), Objective.grpo()))


def test_the_presets_are_the_papers_objectives() -> None:
    gspo_paper, by_turn, grpo = Objective.gspo(), Objective.gspo("turn"), Objective.grpo()
    assert (gspo_paper.ratio_unit, gspo_paper.eps_low, gspo_paper.eps_high) == ("sequence", 3e-4, 4e-4)
    assert (by_turn.ratio_unit, by_turn.eps_low, by_turn.eps_high) == ("turn", 3e-4, 4e-4)
    assert (grpo.ratio_unit, grpo.eps_low, grpo.eps_high) == ("token", 0.2, 0.27)
    for objective in (gspo_paper, by_turn, grpo):
        assert (objective.clip_range_growth, objective.noise_z, objective.anchor) == (0.0, 0.0, "behaviour")


@pytest.mark.parametrize(("eps_low", "eps_high"), [(0.2, 4e-4), (3e-4, 0.2), (0.2, 0.27)])
def test_grpos_eps_on_sequence_ratios_is_refused_with_the_papers_values(eps_low: float, eps_high: float) -> None:
    with pytest.raises(ValueError, match=r"3e-4 / 4e-4; 0\.2 / 0\.27 are GRPO's"):
        Objective(eps_low=eps_low, eps_high=eps_high)


def test_grpos_eps_on_token_ratios_is_accepted() -> None:
    assert Objective(ratio_unit="token", eps_low=0.2, eps_high=0.27).eps_high == 0.27


@pytest.mark.parametrize("eps", [{}, {"eps_low": 0.2}, {"eps_high": 0.27}])
def test_the_clip_of_sequence_ratios_on_token_ratios_is_refused_with_grpos_values(eps: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"^eps_low is .* 'token': nearly every .* Set eps_low = 0\.2 and eps_high = 0\.27"):
        Objective(ratio_unit="token", **eps)
    with pytest.raises(ValueError, match="nearly every token would be clipped"):
        replace(Objective(), ratio_unit="token")


def test_only_the_proximal_anchor_needs_proximal_logprobs_whatever_the_tis_mode() -> None:
    for mode in (None, *get_args(TisMode)):
        objective = Objective(anchor="proximal", tis_mode=mode)
        assert objective.needs_proximal_logprobs
        assert objective.weight_mode == (mode or "truncate")
    for mode in (None, "off"):
        assert not Objective(anchor="behaviour", tis_mode=mode).needs_proximal_logprobs


@pytest.mark.parametrize("mode", ["truncate", "reject"])
def test_a_mismatch_weight_with_the_behaviour_anchor_is_refused_with_a_way_out(mode: TisMode) -> None:
    with pytest.raises(ValueError, match=f"^tis_mode is '{mode}' with anchor 'behaviour'.*tis_mode = 'off'"):
        Objective(anchor="behaviour", tis_mode=mode)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ratio_unit", "chunk"),
        ("anchor", "reference"),
        ("tis_mode", "clip"),
        ("eps_low", 0.0),
        ("eps_low", 1.0),
        ("eps_low", float("nan")),
        ("eps_high", -1e-4),
        ("clip_range_growth", float("inf")),
        ("adaptive_clip_target", 0.0),
        ("adaptive_clip_target", 1.0),
        ("noise_z", float("inf")),
        ("tis_cap", 1.0),
        ("log_ratio_clamp", 0.0),
        ("log_ratio_clamp", 64.0),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} is {value!r}"):
        Objective(**{"ratio_unit": "token", field: value})


def test_importing_the_package_and_its_settings_does_not_import_torch() -> None:
    program = "import sys, gspo; gspo.Objective(); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_every_public_name_can_be_imported_and_others_cannot() -> None:
    for name in gspo.__all__:
        assert getattr(gspo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'gspo_los'"):
        gspo.gspo_los  # noqa: B018
