"""Turns of learner and rollout on one device: who holds the lock may use the device's memory."""

from services.turns.lock import LOCK_FILE, TURN_POLL_S, DeviceLock, turn_holder

__all__ = ["LOCK_FILE", "TURN_POLL_S", "DeviceLock", "turn_holder"]
