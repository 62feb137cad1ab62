"""Asks the broker of a run for its status, to stop it, or to requeue what is quarantined, for the ``gspo`` commands."""

from gspo_services.cli.operator.operator import NoAnswer, Operator, TurnedAway, connection, operator

__all__ = ["NoAnswer", "Operator", "TurnedAway", "connection", "operator"]
