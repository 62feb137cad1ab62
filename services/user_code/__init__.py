"""Agents of users: Python functions in worker processes, programs and services. Nothing of theirs runs here."""

from services.user_code.journal import NoJournal, RecordedStep, StepJournal
from services.user_code.options import AgentPoolOptions, ProcessLimits, UserProcessOptions
from services.user_code.output import UserOutput
from services.user_code.pool import AgentPool
from services.user_code.results import AgentFailure, AgentResult, AgentTask

__all__ = [
    "AgentFailure",
    "AgentPool",
    "AgentPoolOptions",
    "AgentResult",
    "AgentTask",
    "NoJournal",
    "ProcessLimits",
    "RecordedStep",
    "StepJournal",
    "UserOutput",
    "UserProcessOptions",
]
