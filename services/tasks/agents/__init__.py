"""Agents of users: Python functions in worker processes, programs and services. Nothing of theirs runs here."""

from gspo_services.tasks.agents.journal import NoJournal, RecordedStep, StepJournal
from gspo_services.tasks.agents.options import AgentPoolOptions, ProcessLimits, UserProcessOptions
from gspo_services.tasks.agents.output import UserOutput
from gspo_services.tasks.agents.pool import AgentPool
from gspo_services.tasks.agents.program import AgentProgram
from gspo_services.tasks.agents.results import AgentFailure, AgentResult, AgentTask
from gspo_services.tasks.agents.service import AgentService

__all__ = [
    "AgentFailure",
    "AgentPool",
    "AgentPoolOptions",
    "AgentProgram",
    "AgentResult",
    "AgentService",
    "AgentTask",
    "NoJournal",
    "ProcessLimits",
    "RecordedStep",
    "StepJournal",
    "UserOutput",
    "UserProcessOptions",
]
