"""The configuration of a run: one definition of each setting, where it comes from, and its checks."""

from services.runtime.settings.arguments import (
    ProcessArguments,
    add_configuration_arguments,
    forwarded_arguments,
    parse_process_arguments,
)
from services.runtime.settings.configuration import load_settings, override_settings, require_model
from services.runtime.settings.exposure import EXPOSED, is_private
from services.runtime.settings.fingerprint import run_fingerprint
from services.runtime.settings.run_settings import read_run_settings, write_run_settings
from services.runtime.settings.sections import Learner, ObjectiveSettings, Rollout, Sampling, SecuritySection, Settings

__all__ = [
    "EXPOSED",
    "Learner",
    "ObjectiveSettings",
    "ProcessArguments",
    "Rollout",
    "Sampling",
    "SecuritySection",
    "Settings",
    "add_configuration_arguments",
    "forwarded_arguments",
    "is_private",
    "load_settings",
    "override_settings",
    "parse_process_arguments",
    "read_run_settings",
    "require_model",
    "run_fingerprint",
    "write_run_settings",
]
