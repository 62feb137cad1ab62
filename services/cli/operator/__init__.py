"""Asks the brokers of a run for its status, to stop it, or to requeue what is quarantined, for the ``gspo`` commands."""

from gspo_services.cli.operator.line import NoAnswer, OperatorLine, TurnedAway
from gspo_services.cli.operator.operator import Operator, connection, operator

__all__ = ["NoAnswer", "Operator", "OperatorLine", "TurnedAway", "connection", "operator"]
