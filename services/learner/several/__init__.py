"""The learner where several brokers share its run: their shares become one batch. Imported only then."""

from gspo_services.learner.several.connections import SeveralConnections
from gspo_services.learner.several.shares import merged_answers, versions_apart

__all__ = ["SeveralConnections", "merged_answers", "versions_apart"]
