"""Makes the environments of this checkout: `make setup` and the targets that need others call it.

    install.py cpu                        .venv: SGLang, DeepSpeed and all tools, for CPUs
    install.py gpu                        .venv-gpu: SGLang, DeepSpeed and this project, for GPUs with CUDA 13
    install.py here cpu|gpu               all that a run needs, into the environment of the Python that runs this
    install.py beside FOLDER LIST         an environment that sees the packages of .venv beside those of its list
    install.py apart FOLDER LIST          one that has the packages of its list and nothing else

Each can be interrupted, and the same command finishes it. Needs only Python's standard library.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LISTS = HERE.parent
ROOT = LISTS.parent
sys.path.insert(0, str(HERE))
sys.dont_write_bytecode = True

import preflight  # noqa: E402
import pytorch  # noqa: E402
from pip_calls import LOCKED, Pip, SetupError, say  # noqa: E402

PYTHON = ".".join(map(str, sys.version_info[:3]))
CPU, GPU = ROOT / ".venv", ROOT / ".venv-gpu"
GPU_GB = 16
"""Free space, in 1e9 bytes."""
DRIVER = Path(os.environ.get("DRIVER") or "/proc/driver/nvidia/version")
DEEPSPEED = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
"""Its operations are compiled when they are first used; learners on CPUs and on one GPU use none."""


def main(words: list[str]) -> int:
    started = time.monotonic()
    try:
        with only_one():
            match words:
                case ["cpu"]:
                    install_cpu()
                case ["gpu"]:
                    install_gpu()
                case ["here", "cpu" | "gpu" as kind]:
                    install_here(kind)
                case ["beside", folder, name]:
                    install_list(ROOT / folder, name, sees=CPU)
                case ["apart", folder, name]:
                    install_list(ROOT / folder, name)
                case _:
                    raise SetupError(f"{' '.join(words)!r} is none of: cpu, gpu, here, beside, apart")
    except SetupError as error:
        sys.stderr.write(f"setup: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nsetup: interrupted: the same command goes on from here\n")
        return 130
    say(f"done after {time.monotonic() - started:.0f} s")
    return 0


def install_cpu() -> None:
    require(preflight.complaints(CPU, 1 if CPU.exists() else pytorch.CPU_BUILD.disk_gb))
    pip = environment(CPU)
    cpu_packages(pip, CPU, ["cpu.txt", "dev.txt"])
    install_project(pip)


def install_gpu() -> None:
    require([*unmet_by("gpu.txt"), *preflight.complaints(GPU, GPU_GB), *preflight.driver_too_old(DRIVER)])
    pip = environment(GPU)
    gpu_packages(pip)
    install_project(pip)
    pip.check()


def install_here(kind: str) -> None:
    """For who has installed the wheel: nothing else of that environment is touched."""
    prefix = Path(sys.prefix)
    pip = Pip(Path(sys.executable))
    pip.avoid_dead_indexes()
    if kind == "gpu":
        require([*unmet_by("gpu.txt"), *preflight.complaints(prefix, GPU_GB), *preflight.driver_too_old(DRIVER)])
        gpu_packages(pip)
    else:
        require(preflight.complaints(prefix, pytorch.CPU_BUILD.disk_gb))
        cpu_packages(pip, prefix, ["cpu.txt"])


def cpu_packages(pip: Pip, prefix: Path, lists: list[str]) -> None:
    pytorch.install(pip, prefix, os.environ.get("TORCH", ""))
    say("SGLang and what it needs (about 150 packages, 500 MB)")
    # --no-deps: SGLang's own requirements are CUDA builds; cpu.txt names every package that it needs on a CPU.
    pip.install(*LOCKED, *(word for name in lists for word in ("-r", str(LISTS / name))))
    say("DeepSpeed")
    pip.install(*LOCKED, "--no-build-isolation", "-r", str(LISTS / "deepspeed.txt"), env=DEEPSPEED)


def gpu_packages(pip: Pip) -> None:
    say("SGLang, PyTorch and their CUDA libraries (about 5 GB, 10 GB on disk)")
    pip.install(*LOCKED, "-r", str(LISTS / "gpu.txt"))
    say("DeepSpeed")
    pip.install(*LOCKED, "--no-build-isolation", "-r", str(LISTS / "deepspeed.txt"), env={"DS_BUILD_OPS": "0"})


def install_project(pip: Pip) -> None:
    pip.install("--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def install_list(folder: Path, name: str, sees: Path | None = None) -> None:
    """Install one list into an environment that `sees` another one's packages, too."""
    require([*unmet_by(name), *preflight.complaints(folder, 3)])
    pip = environment(folder, sees)
    if sees is not None:
        path = site_packages(sees)
        (site_packages(folder) / "main.pth").write_text(f"import site; site.addsitedir({str(path)!r})\n", encoding="utf-8")
    say(f"{name} into {folder.name}")
    pip.install(*LOCKED, "-r", str(LISTS / name))


def unmet_by(name: str) -> list[str]:
    return preflight.unmet((LISTS / name).read_text(encoding="utf-8"))


def environment(folder: Path, pip_of: Path | None = None) -> Pip:
    """Make the environment, or mend what an interrupted installation left of it.

    It has the locked pip then, or none: that of the environment `pip_of` installs into it.
    """
    python = folder / "bin" / "python"
    if reason := why_unfit(folder, "sys" if pip_of else "pip"):
        say(f"{folder.name} is made anew: {reason}")
        if (folder / "pyvenv.cfg").exists() or not any(folder.iterdir()):
            shutil.rmtree(folder)
        else:
            raise SetupError(f"{folder} is not a virtual environment, and would be overwritten: move it away")
    if not python.exists():
        say(f"{folder.name} with Python {PYTHON} ({sys.executable})")
        command = [sys.executable, "-m", "venv", *(["--without-pip"] if pip_of else []), str(folder)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise SetupError(f"python -m venv failed: {(made.stdout + made.stderr).strip()}")
    mend(site_packages(folder))
    pip = Pip(python, pip_of / "bin" / "python" if pip_of else None)
    pip.avoid_dead_indexes()
    if pip_of:
        return pip
    # An older one cannot continue a broken download.
    pip.install(*LOCKED, "-r", str(LISTS / "pip.txt"))
    return pip


def why_unfit(folder: Path, module: str) -> str | None:
    """Why what is there cannot be used; None also if nothing is there."""
    if not folder.exists():
        return None
    code = f"import sys, {module}; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([folder / "bin" / "python", "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return "it has no Python"
    if done.returncode:
        return "it is half made, or its Python is gone"
    if done.stdout.split() != [str(part) for part in sys.version_info[:2]]:
        return f"it has Python {'.'.join(done.stdout.split())}, and {PYTHON} is asked for"
    return None


def mend(site: Path) -> None:
    """Forget packages that were being installed when pip was killed, so that pip installs them again.

    pip writes INSTALLER last but one: a package without it may lack files, and pip would call it installed.
    """
    for info in site.glob("*.dist-info"):
        if not (info / "INSTALLER").exists():
            say(f"{info.name.removesuffix('.dist-info')} was half installed: once more")
            shutil.rmtree(info)


def site_packages(folder: Path) -> Path:
    found = sorted((folder / "lib").glob("python3.*/site-packages"))
    if not found:
        raise SetupError(f"{folder} has no packages: run `make setup` first")
    return found[0]


def require(complaints: list[str]) -> None:
    if complaints:
        raise SetupError("\nsetup: ".join(complaints))


class only_one:
    """Holds a lock on the checkout's folder: two terminals must not install into one environment at once."""

    def __enter__(self) -> None:
        self._folder = os.open(ROOT, os.O_RDONLY)
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is running: waiting for it")
            fcntl.flock(self._folder, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
