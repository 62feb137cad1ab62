"""What must always hold of one broker and its ledger."""

from tests.simulation.audit.disk import DiskAudit
from tests.simulation.audit.messages import MessageAudit
from tests.simulation.audit.training import TrainingAudit


class BrokerAudit(DiskAudit, MessageAudit, TrainingAudit):
    """All parts of the audit of one broker."""
