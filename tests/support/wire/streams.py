"""A bucket of a delta, written as a replica writes it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_protocol.deltas import as_elements, decode_streams
from gspo_protocol.messages import DeltaBucket


def apply_streams(target: np.ndarray[Any, Any], bucket: DeltaBucket, streams: Sequence[bytes]) -> None:
    """Write a bucket's values into ``target``, uint8 [num_bytes of the version], writable.

    Raises: ValueError when ``decode_streams`` does. Nothing is written then.
    """
    changes = decode_streams(bucket, streams, target.nbytes)
    region = changes.region
    elements = as_elements(
        target[region.offset : region.offset + region.num_elements * region.item_bytes], region.item_bytes
    )
    elements[changes.positions] = changes.new_values(elements[changes.positions])
