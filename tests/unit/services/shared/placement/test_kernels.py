"""Whether SGLang's kernels are built for the CUDA of this Python's torch."""

import os
from pathlib import Path
from typing import Any

import pytest

from gspo_services.shared.placement import require_kernels
from gspo_services.shared.runtime.errors import ConfigurationError


def machine(folder: Path, cuda: str, *libraries: str, package: str = "sglang-kernel", gpus: int = 1) -> dict[str, Any]:
    """A machine with so many GPUs, torch for this release of CUDA, and kernels that need these libraries."""
    folder.mkdir(exist_ok=True)
    (folder / "version.py").write_text(f"cuda: Optional[str] = {cuda}\n")
    (folder / "dev").mkdir()
    for number in range(gpus):
        (folder / "dev" / f"nvidia{number}").touch()
    site, named = folder / "site", package.replace("-", "_")
    (site / f"{named}-0.4.10.dist-info").mkdir(parents=True)
    (site / f"{named}-0.4.10.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.4.10\n"
    )
    objects = ["sgl_kernel/empty.so", "sgl_kernel/none.so", "sgl_kernel/sm100/common_ops.abi3.so"]
    (site / f"{named}-0.4.10.dist-info" / "RECORD").write_text("".join(f"{name},,\n" for name in [*objects, "gone.so"]))
    (site / "sgl_kernel" / "sm100").mkdir(parents=True)
    contents = [b"", b"\x7fELF no library of CUDA: libcudart.so.11 in a text\x00libc.so.6\x00"]
    contents += [b"\x7fELF\x00" + b"".join(f"{name}\x00".encode() for name in ("libc10.so", *libraries)) + os.urandom(5000)]
    for name, content in zip(objects, contents, strict=True):
        (site / name).write_bytes(content)
    return {"devices": folder / "dev", "torch_package": folder, "path": [str(site)]}


@pytest.mark.parametrize("package", ["sglang-kernel", "sgl-kernel"])
@pytest.mark.parametrize("library", ["libnvrtc.so.12", "libcudart.so.12", "libcublasLt.so.12", "libcublas.so.12.8"])
def test_kernels_for_another_cuda_are_named_with_both(library: str, package: str, tmp_path: Path) -> None:
    said = rf"{package} 0\.4\.10 is built for CUDA 12, and torch for CUDA 13\.0: .*setup-gpu.*rollout\.python"
    with pytest.raises(ConfigurationError, match=said):
        require_kernels({}, **machine(tmp_path, "'13.0'", library, package=package))


def test_nothing_is_said_where_both_agree_no_gpu_is_used_or_nothing_is_known(tmp_path: Path) -> None:
    require_kernels({}, **machine(tmp_path / "same", "'13.0'", "libcudart.so.13", "libnvrtc.so.13"))
    require_kernels({}, **machine(tmp_path / "minor", "'12.8'", "libcudart.so.12"))
    other = machine(tmp_path / "other", "'13.0'", "libcudart.so.12")
    require_kernels({"CUDA_VISIBLE_DEVICES": ""}, **other)
    require_kernels({}, **other | {"path": [str(tmp_path)]})
    require_kernels({}, **machine(tmp_path / "cpu", "None", "libcudart.so.12"))
    require_kernels({}, **machine(tmp_path / "no-gpu", "'13.0'", "libcudart.so.12", gpus=0))
    require_kernels({}, **machine(tmp_path / "static", "'13.0'"))


def test_this_machine_has_no_kernels_for_another_cuda() -> None:
    require_kernels()
