"""One TOML file configures a whole run; each process reads the sections it needs.

Precedence: file < environment (``GSPO_BATCH__MAX_LAG=2``) < command line (``--set batch.max_lag=2``).
Unknown keys are errors. This is the one definition of each key, its range, its default and its meaning: docs/settings.md
and ``gspo check --explain`` are made from it.
"""

from services.runtime.settings.sections.agent import AgentSection
from services.runtime.settings.sections.broker import Broker
from services.runtime.settings.sections.learner import Learner
from services.runtime.settings.sections.objective import ObjectiveSettings
from services.runtime.settings.sections.reward import RewardSection
from services.runtime.settings.sections.rollout import Rollout
from services.runtime.settings.sections.run import BatchSection, EnvironmentSection, Evaluation, Model, Run, Sampling
from services.runtime.settings.sections.section import Section
from services.runtime.settings.sections.security import SecuritySection
from services.runtime.settings.sections.settings import Settings
from services.runtime.settings.sections.trackers import TrackersSection

__all__ = [
    "AgentSection",
    "BatchSection",
    "Broker",
    "EnvironmentSection",
    "Evaluation",
    "Learner",
    "Model",
    "ObjectiveSettings",
    "RewardSection",
    "Rollout",
    "Run",
    "Sampling",
    "Section",
    "SecuritySection",
    "Settings",
    "TrackersSection",
]
