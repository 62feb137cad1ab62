"""The product's own audit, as ``gspo audit`` runs it."""

from gspo_services.runs.audit import audit_run as audit

__all__ = ["audit"]
