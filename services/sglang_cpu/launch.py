"""Run `sglang.launch_server` without a GPU and without torchvision: `python -m services.sglang_cpu.launch --model-path ...`.

Three things differ from `python -m sglang.launch_server`.

Torchvision: sglang.srt.configs imports torchvision.transforms for its vision-language configurations. The PyPI wheel of
torchvision is linked to CUDA and breaks beside a CPU build of torch (for transformers as well), so it is left out and
the server's processes get placeholder modules, which raise when something really uses them.

Fork: SGLang spawns its scheduler and detokenizer, because CUDA does not survive a fork, and each of the three processes
imports torch and SGLang, some 10 s of CPU. Here they are forked, while the server still has a single thread: 13 s of CPU to
a healthy server instead of 34. With a second thread around they are spawned after all, which imports this file again as
__mp_main__, so that the placeholders are there too.

torch.compile: off. SGLang compiles two small functions (the seeded sampler and a buffer's copy), for which torch's inductor
needs g++, which a container does not have, and half a minute of it in each new home directory.
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
    """Any attribute of a module that is not installed; calling it says so."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> "_Missing":
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Missing(f"{self._name}.{attribute}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{self._name} was called, but torchvision is not installed in the CPU environment")


class _PlaceholderModule(types.ModuleType):
    """A package whose every attribute is `_Missing`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, attribute: str) -> _Missing:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Missing(f"{self.__name__}.{attribute}")


def install_placeholders() -> None:
    """Put placeholders for torchvision into sys.modules; does nothing where a real one is there."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils import import_utils

    # Transformers caches its answer: it must be asked before the placeholder makes it look installed.
    if import_utils.is_torchvision_available():
        raise RuntimeError("transformers finds a torchvision that Python does not: reinstall the CPU requirements")
    for name in _PLACEHOLDERS:
        module = sys.modules[name] = _PlaceholderModule(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def fork_workers() -> None:
    """Turn SGLang's choice of "spawn" into "fork"; to be called before torch copies multiprocessing's functions."""
    choose = multiprocessing.set_start_method

    def choose_fork(method: str | None, force: bool = False) -> None:
        single_thread = len(os.listdir("/proc/self/task")) == 1
        choose("fork" if method == "spawn" and single_thread else method, force=force)

    multiprocessing.set_start_method = choose_fork


if __name__ == "__main__":
    # Before torch is imported, which reads it once.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    fork_workers()
install_placeholders()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
