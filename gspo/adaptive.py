"""A clip range that follows a target clip fraction: a controller of one number, pure Python.

The clip range of ``gspo.staleness`` estimates how far ratios drift; the aim is to clip a known share of the tokens (15 %
in the GSPO paper, arXiv 2507.18071). After each batch

    log k  <-  log k  +  rate * clip(f / target - 1, -1, 1)          k in [min_scale, max_scale]

where f is the batch's clip fraction over the sequences that have an advantage and are not rejected
(``gspo.diagnostics.signal_clip_fraction``: the others are never clipped, and their share changes as the policy learns), and
k multiplies both bounds in log space: more clipping than wanted widens the clip
range. A step is bounded by ``rate``, so that one odd batch cannot open or close it. The fixed point is f = target; near
it the loop is stable while rate * |df / dlog k| / target < 2. With normally distributed log-ratios |df / dlog k| is below
0.25 (half of the sequences have the advantage sign that can be clipped), so that the default rate is stable for any
target above 0.025.
"""

from __future__ import annotations

import math

from gspo.settings import require_number


class AdaptiveClip:
    """The factor k of the clip range, starting at 1; one ``update`` per batch.

    Give every rank the same (all-reduced) fraction.
    Raises: ValueError for a target outside (0, 1), a rate outside (0, 100) and bounds that exclude 1.
    """

    def __init__(self, *, target: float, rate: float = 0.2, min_scale: float = 1 / 32, max_scale: float = 64) -> None:
        require_number("target", target, low=0.0, high=1.0, low_open=True)
        require_number("rate", rate, low=0.0, high=100.0, low_open=True)
        require_number("min_scale", min_scale, low=0.0, low_open=True)
        require_number("max_scale", max_scale, low=0.0, low_open=True)
        if not min_scale <= 1 <= max_scale:
            raise ValueError(f"min_scale is {min_scale} and max_scale {max_scale}; the scale starts at 1, between them")
        self._target = target
        self._rate = rate
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._scale = 1.0

    @property
    def scale(self) -> float:
        """The factor of both bounds in log space; it has no unit."""
        return self._scale

    def update(self, clip_fraction: float) -> None:
        """Take in one batch's clip fraction. Raises: ValueError for a fraction that is NaN or outside [0, 1]."""
        if not 0 <= clip_fraction <= 1:
            raise ValueError(f"clip_fraction is {clip_fraction!r}; give the clipped share of the tokens, in [0, 1]")
        error = max(-1.0, min(1.0, clip_fraction / self._target - 1))
        self._scale = max(self._min_scale, min(self._max_scale, self._scale * math.exp(self._rate * error)))

    def state_dict(self) -> dict[str, float]:
        """Return k, for a checkpoint."""
        return {"scale": self._scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved state. Raises: ValueError for a state of other keys or a scale outside the bounds."""
        if set(state) != {"scale"}:
            raise ValueError(f"state has keys {sorted(state)}; give those of state_dict: scale")
        scale = float(state["scale"])
        if not self._min_scale <= scale <= self._max_scale:
            raise ValueError(f"scale is {scale}; this controller keeps it in [{self._min_scale}, {self._max_scale}]")
        self._scale = scale
