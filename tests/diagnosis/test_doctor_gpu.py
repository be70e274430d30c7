"""What `fastserial doctor` says of GPUs, on made-up /proc, /sys and /etc; there was no real one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fastserial.cli import doctor
from fastserial.cli.main import app
from fastserial.config import Config
from fastserial.diagnosis import examine as examine_module
from fastserial.diagnosis.examine import Diagnosis, examine, judge
from fastserial.engines.gds.host import GpuHost, probe_gpus

VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (root)\n"
    "GCC version:  gcc version 13.2.0\n"
)
# A machine where cuFile would go by P2PDMA.
FILES = {
    "proc/driver/nvidia/version": VERSION,
    "proc/driver/nvidia/params": 'RegistryDwords: "RMForceStaticBar1=1;"\n',
    "proc/sys/kernel/osrelease": "6.8.0-generic\n",
    "sys/module/nvme_core/parameters/multipath": "N\n",
    "etc/cufile.json": (
        '{\n  // comments are allowed here\n  "logging": {"dir": "http://x"},\n  "properties": {\n'
        '    "use_pci_p2pdma": true, // so they are here\n    "allow_compat_mode": false,\n'
        '    "max_direct_io_size_kb": 16384\n  }\n}\n'
    ),
}


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUFILE_ENV_PATH_JSON", "CUFILE_USE_PCIP2PDMA", "CUFILE_ALLOW_COMPAT_MODE"):
        monkeypatch.delenv(name, raising=False)


def machine(root: Path, **changed: str | None) -> Path:
    """Make the files below `root`; None: without this one. `__` in a name stands for a slash."""
    names = {name.replace("__", "/"): text for name, text in changed.items()}
    for name, text in {**FILES, **names}.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return root


def host(root: Path, **changed: str | None) -> GpuHost:
    found = probe_gpus(machine(root, **changed))
    assert found is not None
    return found


def test_all_there(tmp_path: Path) -> None:
    found = host(tmp_path)
    assert (found.driver, found.nvidia_fs, found.gds) == ("570.124.06", "", "P2PDMA")
    assert (found.p2pdma_lacks, found.compat) == ((), False)
    assert found.cufile_json == str(tmp_path / "etc/cufile.json")


@pytest.mark.parametrize(
    ("name", "text", "lacks"),
    [
        ("proc/sys/kernel/osrelease", "5.15.0\n", "kernel"),
        ("proc/sys/kernel/osrelease", None, "kernel"),
        ("sys/module/nvme_core/parameters/multipath", "Y\n", "multipath=N"),
        ("proc/driver/nvidia/params", 'RegistryDwords: ""\n', "RMForceStaticBar1"),
        ("etc/cufile.json", '{"properties": {"use_pci_p2pdma": false}}', "use_pci_p2pdma"),
        ("etc/cufile.json", "{not json", "use_pci_p2pdma"),
        ("etc/cufile.json", "[]", "use_pci_p2pdma"),
        ("etc/cufile.json", None, "use_pci_p2pdma"),
    ],
)
def test_what_p2pdma_lacks(tmp_path: Path, name: str, text: str | None, lacks: str) -> None:
    found = host(tmp_path, **{name.replace("/", "__"): text})
    (why,) = found.p2pdma_lacks
    assert lacks in why
    assert found.gds == "compat"  # which is not GPUDirect Storage


def test_nvidia_fs(tmp_path: Path) -> None:
    found = host(tmp_path, **{"proc/driver/nvidia-fs/version": "version: 2.24\n"})
    assert (found.gds, found.nvidia_fs) == ("nvidia-fs", "version: 2.24")


def test_configuration_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"properties": {"allow_compat_mode": true}}')
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(mine))
    found = host(tmp_path / "root")
    assert (found.cufile_json, found.compat) == (str(mine), True)


@pytest.mark.parametrize(("text", "gds"), [("true", "P2PDMA"), ("1", "P2PDMA"), ("no", "compat")])
def test_variables_come_before_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, gds: str
) -> None:
    monkeypatch.setenv("CUFILE_USE_PCIP2PDMA", text)
    monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "true")
    settings = '{"properties": {"use_pci_p2pdma": %s}}' % ("true" if text == "no" else "false")
    found = host(tmp_path, etc__cufile__json=settings)
    assert (found.gds, found.compat) == (gds, True)


def test_a_bare_driver(tmp_path: Path) -> None:
    """Nothing else is told: no error, and nothing is made up."""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("something new\n")
    found = probe_gpus(tmp_path)
    assert found is not None
    assert (found.driver, found.nvidia_fs, found.compat) == ("something new", "", None)


# --- what it means ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare() -> Diagnosis:
    """This machine without findings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examine_module, "probe_gpus", lambda: None)
        return dataclasses.replace(examine(), small_pages=None, unknown_variables=(), folder=None)


def about(found: Diagnosis, **options: Any) -> list[str]:
    before = {finding.text for finding in judge(dataclasses.replace(found, gpus=None), Config())}
    new = [one for one in judge(found, Config(**options)) if one.text not in before]
    assert all(finding.remedy and not finding.slow for finding in new)
    return [finding.text for finding in new]


def test_findings(tmp_path: Path, bare: Diagnosis) -> None:
    fine = dataclasses.replace(bare, gpus=host(tmp_path))
    assert about(fine) == []
    (text,) = about(fine, transfer="gds")
    assert "'gds' is not available" in text
    (text,) = about(bare, transfer="gds")  # where there is no GPU at all
    assert "'gds' is not available" in text


def test_shown(
    tmp_path: Path, bare: Diagnosis, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = dataclasses.replace(bare, gpus=host(tmp_path))
    doctor.show(found)
    said = capsys.readouterr().out
    for words in (
        "driver 570.124.06",
        "would go by P2PDMA; used if transfer asks for it",
        "nvidia-fs: not loaded",
        "what it needs is there",
        "compatibility mode not allowed",
    ):
        assert words in said, said
    assert '"driver": "570.124.06"' in found.to_json()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and no finding."""
    monkeypatch.setattr(examine_module, "probe_gpus", lambda: None)
    said = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    words = "GPU", "cuFile", "NVIDIA", "nvidia"
    about_gpus = [" ".join(line.split()) for line in said if any(word in line for word in words)]
    assert about_gpus == ["GPUs no driver of NVIDIA's"], about_gpus
