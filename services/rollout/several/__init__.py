"""A rollout's end of the work channel where several brokers share the run. Imported only then."""

from gspo_services.rollout.several.beats import BeatsInTurn
from gspo_services.rollout.several.connections import SeveralBrokers, open_brokers
from gspo_services.rollout.several.versions import AnnouncedVersions

__all__ = ["AnnouncedVersions", "BeatsInTurn", "SeveralBrokers", "open_brokers"]
