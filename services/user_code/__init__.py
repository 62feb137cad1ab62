"""Agents of users: Python functions in worker processes, programs and services. Nothing of theirs runs here."""

from services.user_code.journal import NoJournal, RecordedStep, StepJournal
from services.user_code.options import AgentPoolOptions, ProcessLimits, UserProcessOptions
from services.user_code.output import UserOutput
from services.user_code.pool import AgentPool
from services.user_code.program import AgentProgram
from services.user_code.results import AgentFailure, AgentResult, AgentTask
from services.user_code.service import AgentService

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
