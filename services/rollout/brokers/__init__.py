"""A rollout's end of the work channel where several brokers share a run: connections, beats, leases asked for, versions."""

from gspo_services.rollout.brokers.asking import Ask, LeaseRequests
from gspo_services.rollout.brokers.beats import Beats
from gspo_services.rollout.brokers.connections import Brokers, open_brokers
from gspo_services.rollout.brokers.versions import AnnouncedVersions

__all__ = ["AnnouncedVersions", "Ask", "Beats", "Brokers", "LeaseRequests", "open_brokers"]
