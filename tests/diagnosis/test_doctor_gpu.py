"""What `fastserial doctor` says of GPUs, on made-up /proc, /sys and /etc; there was no real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
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


def host(root: Path, changed: Mapping[str, str | None] = MappingProxyType({})) -> GpuHost:
    """What is found on a machine with these files changed; None: without this one."""
    for name, text in {**FILES, **changed}.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    found = probe_gpus(root)
    assert found is not None
    return found


FOUND: dict[str, tuple[dict[str, str | None], dict[str, str], dict[str, Any]]] = {
    # what differs from a machine with all, variables, and what is found there
    "all": ({}, {}, {"driver": "570.124.06", "nvidia_fs": "", "gds": "P2PDMA", "compat": False}),
    "nvidia-fs": (
        {"proc/driver/nvidia-fs/version": "version: 2.24\n"},
        {},
        {"gds": "nvidia-fs", "nvidia_fs": "version: 2.24"},
    ),
    "variables come first": (
        {"etc/cufile.json": '{"properties": {"use_pci_p2pdma": false}}'},
        {"CUFILE_USE_PCIP2PDMA": "1", "CUFILE_ALLOW_COMPAT_MODE": "true"},
        {"gds": "P2PDMA", "compat": True},
    ),
    "a variable says no": ({}, {"CUFILE_USE_PCIP2PDMA": "no"}, {"gds": "compat"}),
    "a bare driver": (
        {**dict.fromkeys(FILES), "proc/driver/nvidia/version": "something new\n"},
        {},
        {"driver": "something new", "nvidia_fs": "", "compat": None, "gds": "compat"},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, variables, expected = FOUND[name]
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    found = host(tmp_path, changed)
    assert {field: getattr(found, field) for field in expected} == expected


def test_configuration_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"properties": {"allow_compat_mode": true}}')
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(mine))
    found = host(tmp_path / "root")
    assert (found.cufile_json, found.compat) == (str(mine), True)


@pytest.mark.parametrize(
    ("name", "text", "lacks"),
    [
        ("proc/sys/kernel/osrelease", "5.15.0\n", "kernel"),
        ("proc/sys/kernel/osrelease", None, "kernel"),
        ("sys/module/nvme_core/parameters/multipath", "Y\n", "multipath=N"),
        ("proc/driver/nvidia/params", 'RegistryDwords: ""\n', "RMForceStaticBar1"),
        ("etc/cufile.json", "{not json", "use_pci_p2pdma"),
        ("etc/cufile.json", "[]", "use_pci_p2pdma"),
        ("etc/cufile.json", None, "use_pci_p2pdma"),
    ],
)
def test_what_p2pdma_lacks(tmp_path: Path, name: str, text: str | None, lacks: str) -> None:
    found = host(tmp_path, {name: text})
    (why,) = found.p2pdma_lacks
    assert lacks in why
    assert found.gds == "compat"  # which is not GPUDirect Storage


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


def test_shown(tmp_path: Path, bare: Diagnosis, capsys: pytest.CaptureFixture[str]) -> None:
    found = dataclasses.replace(bare, gpus=host(tmp_path))
    doctor.show(found)
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for words in (
        "gpus.driver 570.124.06",
        "gpus.gds P2PDMA",
        "gpus.nvidia_fs -",
        "gpus.compat no",
    ):
        assert words in said, said
    assert '"driver": "570.124.06"' in found.to_json()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and no finding."""
    monkeypatch.setattr(examine_module, "probe_gpus", lambda: None)
    said = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    words = "gpu", "GPU", "cuFile", "NVIDIA", "nvidia"
    about_gpus = [" ".join(line.split()) for line in said if any(word in line for word in words)]
    assert about_gpus == ["gpus -"], about_gpus
