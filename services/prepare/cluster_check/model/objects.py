"""What is common to all checks: plain objects, the way to a field, quantities, selectors, and what was found."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

Object: TypeAlias = dict[str, Any]
Way: TypeAlias = tuple[str | int, ...]
"""The keys and indices that lead to a field of an object."""
QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
UNITS: Final = {
    "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ClusterFault:
    """What is wrong with one field of one object, and what to do about it."""

    item: Object
    way: Way
    text: str
    way_out: str
    status: Literal["warn", "fail"] = "fail"

    @property
    def field(self) -> str:
        """The field as kubectl writes it: spec.template.spec.containers[0].args."""
        return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.way).removeprefix(".")


def at(node: Any, *steps: str | int) -> Any:
    """The value at the end of ``steps``, or an empty dict where something on the way is missing or is another type."""
    for step in steps:
        is_index = isinstance(node, list) and isinstance(step, int) and step < len(node)
        if not is_index and not (isinstance(node, dict) and step in node):
            return {}
        node = node[step]
    return {} if node is None else node


def items_at(node: Any, *steps: str | int) -> list[Any]:
    """The list at the end of ``steps``; empty where there is none."""
    found = at(node, *steps)
    return found if isinstance(found, list) else []


def number_at(node: Any, *steps: str | int, default: float) -> float:
    """The number at the end of ``steps``, or ``default``."""
    found = at(node, *steps)
    return float(found) if isinstance(found, (int, float)) else default


def name_of(item: Object) -> str:
    return str(at(item, "metadata", "name") or "")


def namespace_of(item: Object) -> str:
    return str(at(item, "metadata", "namespace") or "default")


def title_of(item: Object) -> str:
    return f"{item.get('kind')}/{name_of(item)}"


def quantity(text: object) -> float:
    """Kubernetes's "500m" or "2Gi" as a number. Raises: ValueError."""
    match = QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity: expected a number with m, k, M, G, T, Ki, Mi, Gi or Ti")
    return float(match[1]) * UNITS.get(match[2] or "", 1.0)


def quantity_or_zero(text: object) -> float:
    """A quantity; 0 for what is none, which another check reports."""
    return quantity(text) if QUANTITY.fullmatch(str(text)) else 0.0


def matches(selector: Any, labels: Mapping[str, Any]) -> bool:
    """Whether a LabelSelector (or a Service's plain one) selects these labels. An empty selector selects everything."""
    if not isinstance(selector, dict):
        return False
    whole = bool({"matchLabels", "matchExpressions"} & set(selector))
    plain = at(selector, "matchLabels") if whole else selector
    if any(labels.get(key) != value for key, value in plain.items()):
        return False
    return all(_holds(expression, labels) for expression in items_at(selector, "matchExpressions"))


def _holds(expression: Object, labels: Mapping[str, Any]) -> bool:
    value, values = labels.get(str(expression.get("key"))), items_at(expression, "values")
    return {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }.get(str(expression.get("operator")), False)
