"""What the kernel tells of GPUDirect Storage on a machine with NVIDIA GPUs.

Only files of /proc, /sys and /etc are read. cuFile itself is not called: without a driver its
`cuFileDriverOpen` was seen not to return.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastserial.files.device_id import first_line

__all__ = ["GpuHost", "probe_gpus"]

_CONFIGURATIONS = ("etc/cufile.json", "usr/local/cuda/gds/cufile.json")
# Not JSON quite: there may be comments.
_SWITCH = re.compile(r'^(?:(?!//).)*"use_pci_p2pdma"\s*:\s*true', re.MULTILINE)
_STATIC_BAR = "RMForceStaticBar1=1"
_OLDEST_KERNEL = (6, 2)


@dataclass(frozen=True, slots=True)
class GpuHost:
    """What a machine has for direct transfers between its GPUs and its drives.

    Attributes:
        driver: version of NVIDIA's driver.
        nvidia_fs: version of the kernel module nvidia-fs, empty if it is not loaded.
        p2pdma_lacks: what keeps cuFile from P2PDMA, its way without nvidia-fs.
    """

    driver: str
    nvidia_fs: str
    p2pdma_lacks: tuple[str, ...]

    @property
    def ways(self) -> list[str]:
        """The ways past the host that cuFile may take here."""
        found = ["nvidia-fs"] if self.nvidia_fs else []
        return found if self.p2pdma_lacks else [*found, "P2PDMA"]

    @property
    def gds(self) -> str:
        """How cuFile would move bytes here: `nvidia-fs`, `P2PDMA`, or `compat`, not directly."""
        return (self.ways or ["compat"])[0]


def probe_gpus(root: Path = Path("/")) -> GpuHost | None:
    """Return what there is for direct transfers, None without a driver of NVIDIA's.

    Args:
        root: where /proc, /sys and /etc are.
    """
    told = first_line(root / "proc/driver/nvidia/version")
    if not told:
        return None
    version = re.search(r"\s(\d+\.\d[\d.]*)\s", told)
    return GpuHost(
        driver=version[1] if version else told.partition("\n")[0],
        nvidia_fs=first_line(root / "proc/driver/nvidia-fs/version").partition("\n")[0],
        p2pdma_lacks=tuple(_lacking(root)),
    )


def _lacking(root: Path) -> Iterator[str]:
    release = re.match(r"(\d+)\.(\d+)", first_line(root / "proc/sys/kernel/osrelease"))
    if release is None or (int(release[1]), int(release[2])) <= _OLDEST_KERNEL:
        yield "a kernel newer than 6.2"
    if not _uses_p2pdma(root):
        yield '"use_pci_p2pdma": true in cufile.json (or CUFILE_USE_PCIP2PDMA=true)'
    if first_line(root / "sys/module/nvme_core/parameters/multipath") != "N":
        yield "nvme_core.multipath=N"
    if _STATIC_BAR not in first_line(root / "proc/driver/nvidia/params"):
        yield f"{_STATIC_BAR} in the driver's registry (NVreg_RegistryDwords)"


def _uses_p2pdma(root: Path) -> bool:
    """Return whether cuFile's variable, or else its configuration, says that it may use P2PDMA."""
    variable = os.environ.get("CUFILE_USE_PCIP2PDMA")
    if variable:
        return variable.lower() in ("true", "1")
    given = os.environ.get("CUFILE_ENV_PATH_JSON")
    paths = [Path(given)] if given else [root / name for name in _CONFIGURATIONS]
    text = next(filter(None, map(first_line, paths)), "")
    return _SWITCH.search(text) is not None
