"""The decisions of a HorizontalPodAutoscaler (autoscaling/v2) at each sync, for one external metric of type AverageValue.

The source is the Kubernetes documentation ("Horizontal Pod Autoscaling": algorithm details, configurable scaling behaviour)
and, where it is silent, the controller's steps: (1) wanted = ceil(metric / target), unless metric / (target * replicas) is
within the tolerance of 1, then the present replicas; (2) stabilisation: out to the smallest, in to the largest number wanted
within the direction's window; (3) policies: a number of pods, or per cent of the replicas at the start of each period, out
rounded up, in rounded down; (4) the bounds. A KEDA ScaledObject makes exactly this object.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import yaml

SYNC_S: Final = 15.0
"""--horizontal-pod-autoscaler-sync-period."""
TOLERANCE: Final = 0.1
"""--horizontal-pod-autoscaler-tolerance."""
MANIFEST: Final = Path(__file__).parents[2] / "deploy" / "k8s" / "components" / "autoscaling-hpa" / "hpa.yaml"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """At most ``value`` pods, or per cent of the replicas at its start, within any ``period_s``."""

    kind: Literal["Pods", "Percent"]
    value: int
    period_s: float


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of one direction."""

    stabilization_s: float
    policies: tuple[Policy, ...]
    select: Literal["Max", "Min", "Disabled"] = "Max"


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """Bounds and both directions; the defaults are Kubernetes' own."""

    min_replicas: int = 1
    max_replicas: int = 64
    out: Rules = Rules(
        stabilization_s=0,
        policies=(Policy(kind="Percent", value=100, period_s=15), Policy(kind="Pods", value=4, period_s=15)),
    )
    back: Rules = Rules(stabilization_s=300, policies=(Policy(kind="Percent", value=100, period_s=15),))


def _rules(spec: Mapping[str, Any]) -> Rules:
    return Rules(
        stabilization_s=spec["stabilizationWindowSeconds"],
        policies=tuple(Policy(kind=p["type"], value=p["value"], period_s=p["periodSeconds"]) for p in spec["policies"]),
        select=spec["selectPolicy"],
    )


def deployed(max_replicas: int, path: Path = MANIFEST) -> Behavior:
    """Return the manifest's behaviour with another upper bound: that bound is a budget, not part of the loop."""
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
    return Behavior(
        min_replicas=spec["minReplicas"],
        max_replicas=max_replicas,
        out=_rules(spec["behavior"]["scaleUp"]),
        back=_rules(spec["behavior"]["scaleDown"]),
    )


@dataclass
class Autoscaler:
    """The controller's memory of one HPA: wanted numbers and changes, with their times."""

    behavior: Behavior
    _wanted: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def sync(self, now: float, metric: float | None, replicas: int, target: float = 1.0) -> int:
        """Return the number of replicas from now on. ``metric`` None: it cannot be read, and nothing changes.

        Raises: ValueError for no replicas, which to Kubernetes means that autoscaling is off.
        """
        if replicas < 1:
            raise ValueError(f"replicas is {replicas}: at 0 an HPA is disabled; keep at least one")
        if metric is None:
            return replicas
        wanted = replicas
        if not 1 - TOLERANCE <= metric / (target * replicas) <= 1 + TOLERANCE:
            wanted = math.ceil(metric / target)
        if not self._wanted:
            self._wanted.append((now, replicas))
        wanted = self._limited(now, self._stabilized(now, wanted, replicas), replicas)
        if wanted != replicas:
            self._changes.append((now, wanted - replicas))
        return wanted

    def _stabilized(self, now: float, wanted: int, replicas: int) -> int:
        rules = self.behavior
        least = min([wanted, *self._within(now, rules.out.stabilization_s)])
        most = max([wanted, *self._within(now, rules.back.stabilization_s)])
        longest = max(rules.out.stabilization_s, rules.back.stabilization_s)
        self._wanted = [(at, value) for at, value in self._wanted if at > now - longest] + [(now, wanted)]
        return min(max(replicas, least), most)

    def _within(self, now: float, window_s: float) -> list[int]:
        return [value for at, value in self._wanted if at > now - window_s]

    def _limited(self, now: float, wanted: int, replicas: int) -> int:
        rules = self.behavior
        if wanted > replicas:
            limit = max(self._limit(now, replicas, rules.out, 1), replicas)
            return min(wanted, limit, rules.max_replicas)
        if wanted < replicas:
            limit = min(self._limit(now, replicas, rules.back, -1), replicas)
            return max(wanted, limit, rules.min_replicas)
        return min(max(wanted, rules.min_replicas), rules.max_replicas)

    def _limit(self, now: float, replicas: int, rules: Rules, sign: Literal[1, -1]) -> int:
        """Return the limit of the direction's policies: Max selects the policy that allows the larger change."""
        if rules.select == "Disabled":
            return replicas
        limits = []
        for policy in rules.policies:
            start = replicas - sum(change for at, change in self._changes if at > now - policy.period_s)
            if policy.kind == "Pods":
                limits.append(start + sign * policy.value)
            elif sign > 0:
                limits.append(math.ceil(start * (100 + policy.value) / 100))
            else:
                limits.append(math.floor(start * (100 - policy.value) / 100))
        return max(limits) if (rules.select == "Max") == (sign > 0) else min(limits)
