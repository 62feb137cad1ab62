"""A rollout's end of the work channel where several brokers share a run: leases asked for, versions."""

from services.rollout.brokers.asking import Ask, LeaseRequests
from services.rollout.brokers.versions import AnnouncedVersions

__all__ = ["AnnouncedVersions", "Ask", "LeaseRequests"]
