"""The learner where several brokers share its run: their shares become one batch. Imported only then."""

from gspo_services.learner.several.lines import SeveralLines
from gspo_services.learner.several.shares import merged_answers, versions_apart

__all__ = ["SeveralLines", "merged_answers", "versions_apart"]
