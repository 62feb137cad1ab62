"""The configuration of a run: one definition of each setting, where it comes from, and its checks."""

from services.runtime.settings.arguments import (
    ProcessArguments,
    forwarded_arguments,
    parse_process_arguments,
)
from services.runtime.settings.configuration import (
    Configuration,
    load_configuration,
    load_settings,
    override_settings,
    require_model,
)
from services.runtime.settings.exposure import EXPOSED, is_private
from services.runtime.settings.fingerprint import run_fingerprint
from services.runtime.settings.keys import RENAMED, Key, all_keys, close_match, key_names, purpose, section_names, value_text
from services.runtime.settings.run_settings import SETTINGS_FILE, read_run_settings, write_run_settings
from services.runtime.settings.sections import (
    AgentSection,
    Learner,
    ObjectiveSettings,
    RewardSection,
    Rollout,
    Sampling,
    SecuritySection,
    Settings,
)

__all__ = [
    "EXPOSED",
    "RENAMED",
    "SETTINGS_FILE",
    "AgentSection",
    "Configuration",
    "Key",
    "Learner",
    "ObjectiveSettings",
    "ProcessArguments",
    "RewardSection",
    "Rollout",
    "Sampling",
    "SecuritySection",
    "Settings",
    "all_keys",
    "close_match",
    "forwarded_arguments",
    "is_private",
    "key_names",
    "load_configuration",
    "load_settings",
    "override_settings",
    "parse_process_arguments",
    "purpose",
    "read_run_settings",
    "require_model",
    "run_fingerprint",
    "section_names",
    "value_text",
    "write_run_settings",
]
