"""Tasks from files and folders: rows of several formats, filters, identities, and several sources with weights."""

from gspo_services.tasks.environments.sources.accounting import Accounting, ColumnUse, Roles
from gspo_services.tasks.environments.sources.columns import chat_messages, column_of
from gspo_services.tasks.environments.sources.files import as_mapping, row_at, rows_of
from gspo_services.tasks.environments.sources.filters import RowFilter
from gspo_services.tasks.environments.sources.identity import without_place
from gspo_services.tasks.environments.sources.mixture import (
    READING,
    MixedTasks,
    OnBadRow,
    RowPlace,
    SourceOptions,
    SplitOptions,
    TaskReading,
    TaskSourcePart,
    tasks_of_split,
)
from gspo_services.tasks.environments.sources.packing import UTF8_MARK
from gspo_services.tasks.environments.sources.shards import files_of

__all__ = [
    "READING",
    "UTF8_MARK",
    "Accounting",
    "ColumnUse",
    "MixedTasks",
    "OnBadRow",
    "Roles",
    "RowFilter",
    "RowPlace",
    "SourceOptions",
    "SplitOptions",
    "TaskReading",
    "TaskSourcePart",
    "as_mapping",
    "chat_messages",
    "column_of",
    "files_of",
    "row_at",
    "rows_of",
    "tasks_of_split",
    "without_place",
]
