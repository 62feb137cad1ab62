"""Checks an expression against a vocabulary: which labels its result has, and whether everything in it is exported."""

import re
from collections.abc import Iterator

import promql_parser as promql

from tests.monitoring.vocabulary import TARGET_LABELS, Samples, Vocabulary


class Unknown(ValueError):
    """The expression asks for something that no process exports."""


def labels_of(text: str, known: Vocabulary) -> set[str]:
    """The labels that the result can have. Raises: Unknown; ValueError when the text is not PromQL."""
    return _labels(promql.parse(text), known)


def with_recorded(known: Vocabulary, recorded: dict[str, str]) -> Vocabulary:
    """The vocabulary with recorded series added; each has the labels of its expression. Raises: Unknown."""
    extended = dict(known)
    for name, expr in recorded.items():
        extended[name] = Samples(labels_of(expr, extended))
    return extended


def _labels(node: object, known: Vocabulary) -> set[str]:
    match node:
        case promql.VectorSelector():
            return _selected(node, known)
        case promql.MatrixSelector():
            return _selected(node.vector_selector, known)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return _labels(node.expr, known)
        case promql.Call():
            inner = set().union(*(_labels(argument, known) for argument in node.args))
            if node.func.name == "histogram_quantile" and "le" not in inner:
                raise Unknown(f"histogram_quantile of a series that has no le: {node}")
            if node.func.name == "label_replace":
                return inner | {str(node.args[1].val)}
            return inner - {"le"} if node.func.name == "histogram_quantile" else inner
        case promql.AggregateExpr():
            return _aggregated(node, _labels(node.expr, known))
        case promql.BinaryExpr():
            return _binary(node, known)
        case promql.NumberLiteral() | promql.StringLiteral():
            return set()
    raise AssertionError(f"{type(node).__name__} is not supported here")


def _selected(node: promql.VectorSelector, known: Vocabulary) -> set[str]:
    if node.name not in known:
        raise Unknown(f"no process exports {node.name}")
    samples = known[node.name]
    matchers = [(matcher.op, matcher.name, matcher.value) for matcher in node.matchers.matchers]
    for _, name, _ in matchers:
        if name not in samples.labels:
            raise Unknown(f"{node.name} has no label {name}")
    own = [matcher for matcher in matchers if matcher[1] not in TARGET_LABELS]
    if own and samples.series and not any(_fits(series, own) for series in samples.series):
        raise Unknown(f"no series of {node.name} matches {node}")
    return set(samples.labels)


def _fits(series: dict[str, str], matchers: list[tuple[promql.MatchOp, str, str]]) -> bool:
    return all(_matches(op, wanted, series.get(name, "")) for op, name, wanted in matchers)


def _matches(op: promql.MatchOp, wanted: str, value: str) -> bool:
    if op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
        return (value == wanted) == (op == promql.MatchOp.Equal)
    return (re.fullmatch(wanted, value) is not None) == (op == promql.MatchOp.Re)


def _aggregated(node: promql.AggregateExpr, inner: set[str]) -> set[str]:
    if node.modifier is None:
        return set()
    named = set(node.modifier.labels)
    if not named <= inner:
        raise Unknown(f"{node}: the aggregated series has no {sorted(named - inner)}, only {sorted(inner)}")
    return named if node.modifier.type == promql.AggModifierType.By else inner - named


def _binary(node: promql.BinaryExpr, known: Vocabulary) -> set[str]:
    left, right = _labels(node.lhs, known), _labels(node.rhs, known)
    modifier = node.modifier
    if modifier is None or modifier.matching is None:
        if _is_number(node.lhs) or _is_number(node.rhs):
            return left | right
        if left != right:
            raise Unknown(f"{node}: the sides have different labels, {sorted(left)} and {sorted(right)}: nothing matches")
        return left
    on = set(modifier.matching.labels)
    if not on <= left & right:
        raise Unknown(f"{node}: on {sorted(on)}, but the sides have {sorted(left)} and {sorted(right)}")
    if modifier.card == promql.VectorMatchCardinality.OneToMany:
        return right
    if modifier.card == promql.VectorMatchCardinality.OneToOne:
        return on
    return left


def _is_number(node: object) -> bool:
    match node:
        case promql.NumberLiteral():
            return True
        case promql.ParenExpr() | promql.UnaryExpr():
            return _is_number(node.expr)
        case promql.Call():
            return node.func.name in ("time", "scalar", "vector")
        case promql.BinaryExpr():
            return _is_number(node.lhs) and _is_number(node.rhs)
    return False


def legend_labels(legend: str) -> Iterator[str]:
    """The labels that a legend or an annotation names."""
    yield from re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", legend)
