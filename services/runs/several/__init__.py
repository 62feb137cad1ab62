"""A run of several brokers read and audited as one. Imported only where a run has several ledgers."""

from gspo_services.runs.several.audit import audit_several
from gspo_services.runs.several.shared_run import SharedRun, open_shared_run

__all__ = ["SharedRun", "audit_several", "open_shared_run"]
