"""Compares runs: settings that differ, and curves with intervals over seeds."""

from gspo_services.runs.compare.comparison import Comparison, GroupMeasure, as_plain, compare_runs
from gspo_services.runs.compare.curves import AXES, Curve
from gspo_services.runs.compare.runs import ComparedRun, SeedGroup

__all__ = ["AXES", "ComparedRun", "Comparison", "Curve", "GroupMeasure", "SeedGroup", "as_plain", "compare_runs"]
