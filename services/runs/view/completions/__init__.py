"""All completions of a run: an index in memory, the table of the page, and files to download."""

from gspo_services.runs.view.completions.download import FORMS, Encoder, encoder
from gspo_services.runs.view.completions.index import CompletionIndex, Whole
from gspo_services.runs.view.completions.table import CompletionQuery, Completions, read_query

__all__ = ["FORMS", "CompletionIndex", "CompletionQuery", "Completions", "Encoder", "Whole", "encoder", "read_query"]
