"""``gspo sglang-cpu ...``: ``sglang.launch_server`` without a GPU or torchvision.

It differs from ``python -m sglang.launch_server`` in three ways.

Torchvision: sglang.srt.configs imports torchvision.transforms for its vision-language configurations. The PyPI wheel of
torchvision is linked to CUDA and breaks next to a CPU build of torch (and breaks transformers). So it is not installed, and
the server's processes get placeholder modules, which raise when something really uses them.

Fork: SGLang spawns its scheduler and detokenizer, because CUDA does not survive a fork. Each of the three processes then
imports torch and SGLang, which takes about 10 s of CPU. Here they are forked while the server still has a single thread: a
healthy server costs 13 s of CPU instead of 34. If there is a second thread they are spawned after all; that imports this
file again as __mp_main__, so the placeholders exist there too.

torch.compile: off. SGLang compiles two small functions (the seeded sampler and a buffer's copy). For these torch's inductor
needs g++, which a container does not have, and half a minute in each new home directory.
"""

import importlib.machinery
import importlib.util
import multiprocessing
import os
import runpy
import sys
import types

_PLACEHOLDERS = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
    "torchvision.io",
)


class _Missing:
    """Any attribute of a module that is not installed; a call raises an error that names it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> "_Missing":
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Missing(f"{self._name}.{attribute}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{self._name} was called, but torchvision is not installed in the CPU environment")


class _PlaceholderModule(types.ModuleType):
    """A package whose attributes are all ``_Missing``."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, attribute: str) -> _Missing:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Missing(f"{self.__name__}.{attribute}")


def install_placeholders() -> None:
    """Put placeholders for torchvision into sys.modules; does nothing if torchvision is installed."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils import import_utils

    # Transformers caches its answer: ask before the placeholder makes torchvision look installed.
    if import_utils.is_torchvision_available():
        raise RuntimeError("transformers finds a torchvision that Python does not: reinstall the CPU requirements")
    for name in _PLACEHOLDERS:
        module = sys.modules[name] = _PlaceholderModule(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def fork_workers() -> None:
    """Turn SGLang's choice of "spawn" into "fork". Call it before torch copies multiprocessing's functions."""
    choose = multiprocessing.set_start_method

    def choose_fork(method: str | None, force: bool = False) -> None:
        single_thread = len(os.listdir("/proc/self/task")) == 1
        choose("fork" if method == "spawn" and single_thread else method, force=force)

    multiprocessing.set_start_method = choose_fork


if __name__ == "__main__":
    # Before the import of torch, which reads it once.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    fork_workers()
install_placeholders()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
