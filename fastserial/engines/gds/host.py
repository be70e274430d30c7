"""What the system shows of NVIDIA's driver and GPUDirect Storage.

Only files of /proc, /sys and /etc are read. cuFile itself is not called: without a driver its
`cuFileDriverOpen` was seen not to return.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastserial.files.linux import first_line

__all__ = ["GpuHost", "probe_gpus"]

_CONFIGURATIONS = ("etc/cufile.json", "usr/local/cuda/gds/cufile.json")
_CONFIGURATION_VARIABLE = "CUFILE_ENV_PATH_JSON"
# cuFile takes them before its configuration.
_SWITCH_VARIABLES = {
    "CUFILE_ALLOW_COMPAT_MODE": "allow_compat_mode",
    "CUFILE_USE_PCIP2PDMA": "use_pci_p2pdma",
}
_STATIC_BAR = "RMForceStaticBar1=1"
_OLDEST_KERNEL = (6, 2)


@dataclass(frozen=True, slots=True)
class GpuHost:
    """What there is for direct transfers between NVIDIA GPUs and drives.

    Attributes:
        driver: version of NVIDIA's driver.
        nvidia_fs: version of the kernel module nvidia-fs, empty if it is not loaded.
        p2pdma_lacks: what keeps cuFile from P2PDMA, its path without nvidia-fs.
        cufile_json: cuFile's configuration, empty if there is none.
        compat: whether cuFile may read and write through the host where there is no other path;
            None: not set.
    """

    driver: str
    nvidia_fs: str
    p2pdma_lacks: tuple[str, ...]
    cufile_json: str
    compat: bool | None

    @property
    def paths(self) -> list[str]:
        """The paths past the host that cuFile may take here."""
        found = ["nvidia-fs"] if self.nvidia_fs else []
        return found if self.p2pdma_lacks else [*found, "P2PDMA"]

    @property
    def gds(self) -> str:
        """How cuFile would move bytes here: `nvidia-fs`, `P2PDMA`, or `compat`, not directly."""
        return (self.paths or ["compat"])[0]


def probe_gpus(root: Path = Path("/")) -> GpuHost | None:
    """Return what there is, None without a driver of NVIDIA's.

    Args:
        root: where /proc, /sys and /etc are.
    """
    proc = root / "proc/driver/nvidia"
    text = first_line(proc / "version")
    if not text:
        return None
    version = re.search(r"\s(\d+\.\d[\d.]*)\s", text)
    name, settings = _configuration(root)
    settings |= _switches_of_environment()
    return GpuHost(
        driver=version[1] if version else text.partition("\n")[0],
        nvidia_fs=first_line(root / "proc/driver/nvidia-fs/version").partition("\n")[0],
        p2pdma_lacks=tuple(_lacking(root, settings)),
        cufile_json=name,
        compat=settings.get("allow_compat_mode"),
    )


def _lacking(root: Path, settings: dict[str, bool]) -> Iterator[str]:
    release = re.match(r"(\d+)\.(\d+)", first_line(root / "proc/sys/kernel/osrelease"))
    if release is None or (int(release[1]), int(release[2])) <= _OLDEST_KERNEL:
        yield "a kernel newer than 6.2"
    if not settings.get("use_pci_p2pdma"):
        yield '"use_pci_p2pdma": true in cufile.json (or CUFILE_USE_PCIP2PDMA=true)'
    if first_line(root / "sys/module/nvme_core/parameters/multipath") != "N":
        yield "nvme_core.multipath=N"
    if _STATIC_BAR not in first_line(root / "proc/driver/nvidia/params"):
        yield f"{_STATIC_BAR} in the driver's registry (NVreg_RegistryDwords)"


def _configuration(root: Path) -> tuple[str, dict[str, bool]]:
    """Return the name of cuFile's configuration, and the switches in it."""
    given = os.environ.get(_CONFIGURATION_VARIABLE)
    for path in [Path(given)] if given else [root / name for name in _CONFIGURATIONS]:
        text = first_line(path)
        if text:
            return str(path), _switches(text)
    return "", {}


def _switches(text: str) -> dict[str, bool]:
    """Return the switches under `properties`. The file may hold comments, as JSON may not."""
    plain = re.sub(r"^\s*//.*$|(?<=[\s,{])//.*$", "", text, flags=re.MULTILINE)
    try:
        properties = json.loads(plain).get("properties", {})
        return {name: value for name, value in properties.items() if isinstance(value, bool)}
    except (ValueError, AttributeError):
        return {}


def _switches_of_environment() -> dict[str, bool]:
    found = {name: os.environ.get(variable) for variable, name in _SWITCH_VARIABLES.items()}
    return {name: value.lower() in ("true", "1") for name, value in found.items() if value}
