"""A ledger of the release before this one is brought forward when a broker opens it; what it was is kept."""

from gspo_services.broker.store.migration.forward import KEPT, bring_forward, other_schema

__all__ = ["KEPT", "bring_forward", "other_schema"]
