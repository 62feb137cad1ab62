"""The benchmark of weight versions runs, and its figures are those of the parts that a rollout has."""

from benchmarks.weight_updates.copy import copy


def test_a_version_by_files_and_by_patch_costs_less_than_a_whole_one() -> None:
    rows = {row["way"]: row for row in copy(num_layers=1, num_versions=1)}
    assert 0 < rows["files"]["bytes, of all"] < 0.2
    assert 0 < rows["patch"]["bytes, of all"] < 0.2
    assert 0 < rows["patch"]["CPU, of all by cuda"] < 1
