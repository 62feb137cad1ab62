"""Whether an engine computes what the learner computes: the log-probs of a probe compared, and what may differ. Pure.

A span of the probe counts by its median: a router's choice that rounding decides moves one token by a nat, while another
window, position or norm moves nearly all.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gspo_protocol.messages import Probe
from gspo_protocol.probes import probe_spans

Floats = NDArray[np.float64]


class Noise(NamedTuple):
    """What rounding explains, in nats a token, as the median of a span."""

    least: float
    """Whatever the pair's own noise is."""
    most: float
    """Of the first tokens, whose noise the later ones are held against."""


_OF_FLOAT32: Final = {"cpu": Noise(2e-5, 1e-4)}
_OF_OTHERS: Final = Noise(1e-3, 1e-3)
"""A GPU's kernels may multiply float32 as TF32."""
NOISE: Final = {"float16": Noise(2e-3, 0.05), "bfloat16": Noise(0.02, 0.15)}
_OWN: Final = 5.0
"""Times the median of the first tokens, which see little of positions and windows: what is more has another reason."""
_SHOWN: Final = 6
_PLACES: Final = (
    "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "max_position_embeddings",
)  # fmt: skip
_PASSIVE: Final = frozenset(
    {
        "architectures", "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "auto_map",
        "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout",
    }
)  # fmt: skip
"""Keys of config.json that change no log-prob."""


def disagreement(
    found: Sequence[float],
    probe: Probe,
    *,
    dtype: str,
    device: str,
    quantised_cache: bool = False,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Return how an engine's log-probs of a probe differ from the learner's, and why; empty: as far as rounding explains.

    Args:
        found: of the tokens of all spans, in nats.
        dtype: the engine's, as ``device``.
        quantised_cache: its keys and values are rounded further, on purpose.
        config: the engine's config.json; None: it is unknown.

    Raises: ValueError when the probe has another number of tokens.
    """
    spans = _spans(found, probe)
    noise = _noise({dtype, probe.dtype}, device, quantised_cache)
    medians = [float(np.median(np.abs(part))) for _, part in spans]
    later = min(noise.most, max(noise.least, _OWN * medians[0]))
    bounds = [noise.most, *(later for _ in spans[1:])]
    # Not ``> bound``, which NaN passes.
    wrong = [place for place, (median, bound) in enumerate(zip(medians, bounds, strict=True)) if not median <= bound]
    if not wrong:
        return ""
    first, part = spans[wrong[0]]
    begins = first + int(np.argmax(~(np.abs(part) <= bounds[wrong[0]])))
    worst, place = max((float(np.abs(each).max()), at + int(np.abs(each).argmax())) for at, each in spans)
    side = "lower" if np.concatenate([each for _, each in spans]).mean() < 0 else "higher"
    return (
        f"engine and learner compute other log-probs of the same tokens with the same weights: from token {begins} of "
        f"{probe.num_tokens} on, {medians[wrong[0]]:.2g} nats a token there (rounding explains {bounds[wrong[0]]:.1g}); the "
        f"engine's are {side}, by {worst:.2g} at token {place}. {_causes(probe, spans, wrong[0], begins, config)}"
    )


def _spans(found: Sequence[float], probe: Probe) -> list[tuple[int, Floats]]:
    """The first token of each span, and engine minus learner there."""
    spans = probe_spans(probe.num_tokens)
    number = sum(last - first for first, last in spans)
    if not len(found) == len(probe.logprobs) == number:
        raise ValueError(
            f"a probe of {probe.num_tokens} tokens has {number} log-probs, the learner gave {len(probe.logprobs)} and the "
            f"engine {len(found)}"
        )
    whole = np.asarray(found, dtype=np.float64) - np.asarray(probe.logprobs, dtype=np.float64)
    ends = np.cumsum([last - first for first, last in spans])[:-1]
    return [(first, part) for (first, _), part in zip(spans, np.split(whole, ends), strict=True)]


def _noise(dtypes: set[str], device: str, quantised_cache: bool) -> Noise:
    """Of the less precise of the two sides."""
    if quantised_cache:
        return Noise(NOISE["bfloat16"].most, NOISE["bfloat16"].most)
    unknown = dtypes - {"float32", *NOISE}
    named = dtypes | ({"bfloat16"} if unknown else set())
    return next((noise for name, noise in reversed(NOISE.items()) if name in named), _OF_FLOAT32.get(device, _OF_OTHERS))


def _causes(
    probe: Probe, spans: Sequence[tuple[int, Floats]], wrong: int, begins: int, config: Mapping[str, Any] | None
) -> str:
    """What differs, where both configurations are known, else what such a difference may come from."""
    own: dict[str, Any] = json.loads(probe.config) if probe.config else {}
    if own and config is not None:
        differing = list(_differing(config, own))
        if differing:
            return f"Their config.json differ: {'; '.join(differing[:_SHOWN])}: give both the same files"
    told = "; ".join(f"{key} {json.dumps(own[key])}" for key in _PLACES if own.get(key) is not None) or "unknown"
    if wrong:
        return f"Before it they agree: a sliding window, rope's scaling or the cache differs (the learner's: {told})"
    if begins > 8 or _grows(spans):
        return f"It grows with the position: rope's theta or scaling, or a sliding window differs (the learner's: {told})"
    part = spans[0][1]
    if part.mean() < 0 and part.std() < 0.5 * abs(part.mean()):
        return "It is nearly the same for all tokens: the engine's vocabulary has more entries, such as rows of padding"
    return "It is there from the first token on: a norm's epsilon, a weight, an activation, a scale or the vocabulary"


def _grows(spans: Sequence[tuple[int, Floats]]) -> bool:
    """Whether the first few tokens differ much less than those behind them."""
    begin = np.abs(spans[0][1])
    return len(begin) > 8 and float(np.median(begin[:4])) < 0.25 * float(np.median(begin[4:]))


def _differing(engine: Mapping[str, Any], learner: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted({*engine, *learner} - _PASSIVE):
        mine, other = engine.get(key), learner.get(key)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            yield from _differing(mine, other, f"{prefix}{key}.")
        elif mine != other:
            yield f"{prefix}{key} is {_said(mine)} in the engine, {_said(other)} in the learner"


def _said(value: Any) -> str:
    return "missing" if value is None else json.dumps(value)[:200]
