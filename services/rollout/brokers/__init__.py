"""A rollout's end of the work channel where several brokers share a run: connections, beats, leases asked for, versions."""

from services.rollout.brokers.asking import Ask, LeaseRequests
from services.rollout.brokers.beats import Beats
from services.rollout.brokers.connections import Brokers, open_brokers
from services.rollout.brokers.versions import AnnouncedVersions

__all__ = ["AnnouncedVersions", "Ask", "Beats", "Brokers", "LeaseRequests", "open_brokers"]
