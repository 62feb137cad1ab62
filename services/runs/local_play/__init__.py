"""Plays episodes in one process, without a run: their intake, what is trained on, users' errors."""

from gspo_services.runs.local_play.failures import of_the_configuration, places_of, told
from gspo_services.runs.local_play.intake import VERSION, LocalIntake
from gspo_services.runs.local_play.mask import Mask, TokenRun, Use, mask_of

__all__ = ["VERSION", "LocalIntake", "Mask", "TokenRun", "Use", "mask_of", "of_the_configuration", "places_of", "told"]
