"""Machines for which a run is estimated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator."""

    name: str
    memory_bytes: float
    """Memory that nvidia-smi reports."""
    bandwidth: float | None
    """Bytes a second between the device and its memory; None: unknown."""
    peak: float | None
    """Operations a second in bfloat16, dense; None: unknown."""
    link: float | None = None
    """Bytes a second and direction between GPUs of one machine (NVLink); None: unknown, or there are none."""
    capability: tuple[int, int] | None = None
    """Compute capability, as nvidia-smi reports it; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The run's hardware."""

    device: Device | None
    """None: no GPU."""
    num_devices: int = 0
    cores: int = 1
    """Cores of one machine."""
    memory_bytes: float = 0.0
    """Memory of one machine; 0: unknown."""
    is_named: bool = False
    """Whether the command line named it; otherwise it is this machine."""

    @property
    def text(self) -> str:
        """In a few words."""
        if self.device is None:
            return f"{self.cores} cores, no GPU"
        return f"{self.num_devices} x {self.device.name}"


_MIB: Final = 2.0**20
_DEVICES: Final = tuple(
    Device(name=name, memory_bytes=mib * _MIB, bandwidth=bandwidth * 1e12, peak=peak * 1e12, link=link and link * 1e9)
    for name, mib, bandwidth, peak, link in (
        ("A100", 81_920, 2.04, 312, 300),
        ("H100", 81_559, 3.35, 989, 450),
        ("H200", 143_771, 4.8, 989, 450),
        ("B200", 183_359, 7.7, 2250, 900),
        ("L40S", 46_068, 0.864, 362, None),
        ("4090", 24_564, 1.008, 165, None),
    )
)
"""Memory as nvidia-smi reports it, bandwidth, dense bfloat16 and half of NVLink's total from NVIDIA's
data sheets: SXM, 80 GB for A100 and H100."""


def known_devices() -> tuple[str, ...]:
    """Return the names that ``device_named`` knows."""
    return tuple(device.name for device in _DEVICES)


def device_named(name: str, memory_bytes: float | None = None) -> Device | None:
    """Return the device of this name, as a person or nvidia-smi writes it; None if unknown.

    ``memory_bytes``: what the device itself reports, for variants with other memory.
    """
    plain = name.upper().replace(" ", "").replace("-", "").replace("_", "")
    found = next((device for device in _DEVICES if device.name in plain), None)
    if found is None or memory_bytes is None:
        return found
    return replace(found, memory_bytes=memory_bytes)
