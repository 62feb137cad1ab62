"""Tasks from files and folders: rows of several formats, filters, identities, and several sources with weights."""

from gspo_services.tasks.environments.sources.columns import chat_messages, column_of
from gspo_services.tasks.environments.sources.files import rows_of
from gspo_services.tasks.environments.sources.filters import RowFilter
from gspo_services.tasks.environments.sources.identity import without_place
from gspo_services.tasks.environments.sources.mixture import (
    MixedTasks,
    OnBadRow,
    RowPlace,
    SourceOptions,
    TaskReading,
    TaskSourcePart,
    as_mapping,
    tasks_of_split,
)

__all__ = [
    "MixedTasks",
    "OnBadRow",
    "RowFilter",
    "RowPlace",
    "SourceOptions",
    "TaskReading",
    "TaskSourcePart",
    "as_mapping",
    "chat_messages",
    "column_of",
    "rows_of",
    "tasks_of_split",
    "without_place",
]
