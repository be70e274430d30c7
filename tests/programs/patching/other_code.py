"""Scenes of patching torch: `SCENE ARGUMENTS`, or `each SCENE...`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from support.patched import both, caught, functions, main, same

import fastserial
import fastserial.patching.save_hooks as hooks
from fastserial.patching import patches as patchset


def replaced_before_install() -> None:
    real = torch.serialization._save

    def theirs(*args, **kwargs):
        return real(*args, **kwargs)

    torch.serialization._save = theirs
    before = functions()
    result, warned = caught(fastserial.install)
    assert result is False and len(warned) == 1, warned
    assert "torch.serialization._save" in warned[0] and "fastserial doctor" in warned[0]
    assert caught(fastserial.install) == (False, [])
    assert same(functions(), before) and not both()
    with pytest.raises(ImportError) as error:
        fastserial.install(strict=True)
    assert isinstance(error.value, fastserial.PatchError)
    torch.serialization._save = real
    assert fastserial.install() and both()


def replaced_after_install() -> None:
    stock = functions()
    fastserial.install()
    mine = torch.serialization._save
    calls = []

    def theirs(*args, **kwargs):
        calls.append(1)
        return mine(*args, **kwargs)

    torch.serialization._save = theirs
    assert fastserial.install() and torch.serialization._save is theirs
    assert fastserial.status().replaced == ("torch.serialization._save",)
    assert both() and calls
    done, warned = caught(fastserial.uninstall)
    assert done and len(warned) == 1 and "_save" in warned[0], warned
    assert same(functions(), {**stock, "_save": theirs})
    calls.clear()
    assert not both() and calls
    assert mine.__code__ is stock["_save"].__code__


def an_unknown_version_with_known_functions() -> None:
    for version in ("99.1.0", "a fork of mine"):
        torch.__version__ = version
        assert caught(fastserial.install, strict=True) == (True, [])
        assert fastserial.status().exact is False and fastserial.status().torch == version
        assert both()
        fastserial.uninstall()


def unknown_functions_stay_stock(patches: str, version: str, message: str) -> None:
    patchset.patches_dir = lambda: Path(patches)
    torch.__version__ = version or torch.__version__
    before = functions()
    result, warned = caught(fastserial.install)
    assert result is False and len(warned) == 1, warned
    assert caught(fastserial.install) == (False, [])
    assert same(functions(), before) and not both() and not fastserial.installed()
    assert fastserial.status().patch is None and fastserial.status().reason in warned[0]
    assert torch.__version__ in warned[0] and "fastserial doctor" in warned[0]
    assert "fastserial patches check" in warned[0]
    with pytest.raises(fastserial.PatchError) as error:
        fastserial.install(strict=True)
    assert isinstance(error.value, ImportError) and str(error.value) == warned[0]
    assert same(functions(), before) and message in warned[0]


CHANGES = {
    "another line": lambda text: text.replace('"byteorder"', '"byte" "order"'),
    "another name": lambda text: text.replace("def _legacy_save(", "def _legacy_save2("),
    "a line more": lambda text: "# one line more\n" + text,
    "no source": lambda text: None,
}


def modified_source_stays_stock(change: str, message: str) -> None:
    text = torch.serialization.__spec__.loader.get_source("torch.serialization")
    changed = CHANGES[change](text)
    assert changed != text

    class Loader:
        def get_source(self, name):
            return changed

    torch.serialization.__spec__.loader = Loader()
    before = functions()
    result, warned = caught(fastserial.install)
    assert result is False and message in warned[0], warned
    assert "stay stock" in warned[0] and "`fastserial patches check`" in warned[0], warned
    assert same(functions(), before) and not both()


def a_failed_self_check_stays_stock() -> None:
    hooks.self_check = lambda: "a strange machine"
    before = functions()
    result, warned = caught(fastserial.install)
    assert result is False and "a strange machine" in warned[0]
    assert same(functions(), before) and not both()


def torch_compile_does_not_trace_it(first: str = "") -> None:
    if first:
        importlib.import_module(first)
    fastserial.install()
    graphs = []

    def backend(module, inputs):
        graphs.append(module.code)
        return module

    @torch.compile(backend=backend)
    def step(x):
        y = x + 1
        torch.save({"y": y}, "a.pt")
        torch.save({"y": y}, "b.pt", _use_new_zipfile_serialization=False)
        return y * 2

    assert step(torch.ones(4)).tolist() == [4.0] * 4
    for path in ("a.pt", "b.pt"):
        assert torch.load(path)["y"].tolist() == [2.0] * 4
    assert len(graphs) == 2, graphs
    from torch._dynamo import trace_rules

    assert trace_rules.check(fastserial.patching.save_hooks.open_zip_writer)
    assert trace_rules.check(torch.serialization._save)


if __name__ == "__main__":
    main(globals())
