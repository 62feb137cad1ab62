"""The library's objective from a run's settings: one place, so that a configuration is judged by the library itself."""

from typing import TYPE_CHECKING

from gspo.settings import Objective

if TYPE_CHECKING:
    from services.runtime.settings.sections import ObjectiveSection


def objective_of(section: "ObjectiveSection") -> Objective:
    """Raises: ValueError for values that do not fit together."""
    return Objective(
        ratio_unit=section.ratio_unit,
        eps_low=section.eps_low,
        eps_high=section.eps_high,
        clip_range_growth=section.clip_range_growth,
        noise_z=section.noise_z,
        anchor=section.anchor,
        # Against the engine's own log-probs the ratio holds the mismatch already: a weight would count it twice.
        mismatch_mode=section.mismatch_mode if section.anchor == "proximal" else "off",
        mismatch_cap=section.mismatch_cap,
        adaptive_clip_target=section.adaptive_clip_target,
    )
