"""How much of the broker each peer and each key may use: places, messages, leases, time and faults. Pure."""

from gspo_services.broker.quotas.buckets import Buckets
from gspo_services.broker.quotas.places import PLACES, RETRY_S, NoPlace, Places, makes_room
from gspo_services.broker.quotas.progress import MIN_PATIENCE_S, Progress
from gspo_services.broker.quotas.quotas import (
    MAX_SLOWED_RETRY_S,
    QUOTAS,
    SHUT_OUT_S,
    SLOWED_LEASES,
    SLOWED_RETRY_S,
    STATUS_WEIGHT,
    Change,
    OffenceReason,
    Quota,
    Quotas,
    Subject,
    subjects,
)

__all__ = [
    "MAX_SLOWED_RETRY_S",
    "MIN_PATIENCE_S",
    "PLACES",
    "QUOTAS",
    "RETRY_S",
    "SHUT_OUT_S",
    "SLOWED_LEASES",
    "SLOWED_RETRY_S",
    "STATUS_WEIGHT",
    "Buckets",
    "Change",
    "NoPlace",
    "OffenceReason",
    "Places",
    "Progress",
    "Quota",
    "Quotas",
    "Subject",
    "makes_room",
    "subjects",
]
