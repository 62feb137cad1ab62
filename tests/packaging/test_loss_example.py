"""The training loop of docs/gspo.md runs as it stands there, on torch and the standard library alone."""

import sys
from pathlib import Path

from tests.packaging.example import program, rewards_of

# What an environment made by `pip install torch` has, without numpy.
TORCH_ALONE = (
    *("torch", "torchgen", "functorch", "filelock", "typing_extensions", "sympy", "mpmath", "networkx"),
    *("jinja2", "markupsafe", "fsspec", "setuptools"),
)

# As if nothing else were installed: names outside are not found, by the example or by torch, which looks for more.
GUARD = f"""
import sys
class WithoutTheRest:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = {{"gspo", *{TORCH_ALONE!r}, *sys.stdlib_module_names}}
        return self.finder.find_spec(name, path, target) if top in known or top.startswith("_sysconfigdata") else None
sys.meta_path[:] = map(WithoutTheRest, sys.meta_path)
"""


def test_the_loop_of_the_readme_learns_with_torch_alone(tmp_path: Path) -> None:
    rewards = rewards_of(Path(sys.executable), GUARD + program(), tmp_path)
    assert len(rewards) == 80
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.95


def test_the_guard_of_this_test_refuses_numpy(tmp_path: Path) -> None:
    code = GUARD + "try:\n    import numpy\nexcept ModuleNotFoundError:\n    print('step 0: reward 1')"
    assert rewards_of(Path(sys.executable), code, tmp_path) == [1.0]
