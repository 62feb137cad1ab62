"""One TOML file configures a whole run; each process reads the sections it needs.

Precedence: file < environment (``GSPO_BATCH__MAX_LAG=2``) < command line (``--set batch.max_lag=2``).
Unknown keys are errors. This is the one definition of each key, its range, its default and its meaning: docs/settings.md
and ``gspo check --explain`` are made from it.
"""

from gspo_services.shared.settings.sections.agent import AgentSection
from gspo_services.shared.settings.sections.broker import Broker
from gspo_services.shared.settings.sections.data import DataSection
from gspo_services.shared.settings.sections.distillation import SCORES_DIRECTORY, DistillationSection
from gspo_services.shared.settings.sections.evaluation import ONLY_SET, Evaluation, EvaluationSet
from gspo_services.shared.settings.sections.learner import Learner, LoraSection
from gspo_services.shared.settings.sections.objective import ObjectiveSettings
from gspo_services.shared.settings.sections.reward import RewardSection
from gspo_services.shared.settings.sections.rollout import Rollout
from gspo_services.shared.settings.sections.run import BatchSection, EnvironmentSection, Model, Run, Sampling
from gspo_services.shared.settings.sections.sandbox import SandboxSection
from gspo_services.shared.settings.sections.schedule import (
    SCHEDULED,
    Schedule,
    Scheduled,
    ScheduleSection,
    critical_batches,
    curves,
    value_at,
)
from gspo_services.shared.settings.sections.section import Section
from gspo_services.shared.settings.sections.security import SecuritySection
from gspo_services.shared.settings.sections.serve import ServeSection
from gspo_services.shared.settings.sections.settings import Settings
from gspo_services.shared.settings.sections.trackers import TrackersSection

__all__ = [
    "ONLY_SET",
    "SCHEDULED",
    "SCORES_DIRECTORY",
    "AgentSection",
    "BatchSection",
    "Broker",
    "DataSection",
    "DistillationSection",
    "EnvironmentSection",
    "Evaluation",
    "EvaluationSet",
    "Learner",
    "LoraSection",
    "Model",
    "ObjectiveSettings",
    "RewardSection",
    "Rollout",
    "Run",
    "Sampling",
    "SandboxSection",
    "Schedule",
    "ScheduleSection",
    "Scheduled",
    "Section",
    "SecuritySection",
    "ServeSection",
    "Settings",
    "TrackersSection",
    "critical_batches",
    "curves",
    "value_at",
]
