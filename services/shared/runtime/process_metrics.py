"""How a process declares its Prometheus metrics, and those that every process has: its build, memory, CPU and files."""

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase

DISTRIBUTION: Final = "gspo"
M = TypeVar("M", bound=MetricWrapperBase)


class DeclaredMetric(Generic[M]):
    """A row of a ``MetricTable``; an instance of the table has the metric itself under this name."""

    def __init__(
        self, kind: type[M], name: str, text: str, labels: Sequence[str], zeros: Iterable[str] = (), **options: Any
    ) -> None:
        self._kind = kind
        self._name = name
        self._text = text
        self._labels = labels
        self._zeros = tuple(zeros)
        self._options = options

    def __get__(self, instance: object, owner: type) -> M:
        """Tells type checkers what an instance has; it hides this row from then on."""
        raise AttributeError(f"{owner.__name__} only declares {self._name}: an instance registers and has the metric")

    def register(self, prefix: str, registry: CollectorRegistry) -> M:
        """Return the metric, with its first series."""
        metric = self._kind(f"{prefix}{self._name}", self._text, self._labels, registry=registry, **self._options)
        for value in self._zeros:
            metric.labels(value)
        return metric


def counter(name: str, text: str, *labels: str, zeros: Iterable[str] = ()) -> DeclaredMetric[Counter]:
    """``zeros``: values of the one label whose series exist from the start, because rate() and increase() miss the first
    event of a series that appears with it."""
    return DeclaredMetric(Counter, name, text, labels, zeros)


def gauge(name: str, text: str, *labels: str, zeros: Iterable[str] = ()) -> DeclaredMetric[Gauge]:
    """See ``counter``."""
    return DeclaredMetric(Gauge, name, text, labels, zeros)


def histogram(
    name: str,
    text: str,
    *labels: str,
    buckets: Sequence[float] = Histogram.DEFAULT_BUCKETS,
    zeros: Iterable[str] = (),
) -> DeclaredMetric[Histogram]:
    """See ``counter``. ``buckets``: their upper bounds."""
    return DeclaredMetric(Histogram, name, text, labels, zeros, buckets=buckets)


class MetricTable:
    """Metrics that a class declares as its attributes, with ``counter``, ``gauge`` and ``histogram``."""

    prefix: ClassVar[str]
    """The prefix of every metric's name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register them, in the order of their declarations."""
        for each in reversed(type(self).__mro__):
            for attribute, declared in vars(each).items():
                if isinstance(declared, DeclaredMetric):
                    vars(self)[attribute] = declared.register(self.prefix, registry)


def register_process(registry: CollectorRegistry, component: Literal["broker", "rollout", "learner"]) -> None:
    """Add ``gspo_build_info`` and the ``process_*`` metrics of this process to ``registry``."""
    ProcessCollector(registry=registry)
    info = Gauge(
        "gspo_build_info",
        "1, labelled with this process's part in the run and its release.",
        ["component", "version", "python"],
        registry=registry,
    )
    info.labels(component=component, version=version(DISTRIBUTION), python=platform.python_version()).set(1)
