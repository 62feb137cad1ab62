"""What the brokers that share a run answer, as one answer. Imported only where there are several."""

from gspo_services.cli.several.merging import merged_status

__all__ = ["merged_status"]
