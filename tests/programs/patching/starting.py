"""Scenes of the start of a process: `SCENE ARGUMENTS`."""

from __future__ import annotations

import dataclasses
import sys
import warnings


def at_the_import_of_torch(wanted: str, named: str = "") -> None:
    assert "torch" not in sys.modules
    assert ("fastserial" in sys.modules) is (wanted == "True" or named != "")
    strict = "error" in sys.warnoptions
    with warnings.catch_warnings(record=not strict) as found:
        import torch  # noqa: F401
    assert strict or any(named in str(one.message) for one in found or ()) is (named != "")
    from support.patched import both

    import fastserial

    assert fastserial.installed() is (wanted == "True")
    assert both() is (wanted == "True")


def run_with(*words: str) -> None:
    from fastserial.cli.run import run

    run(list(words))


def trouble_at_the_start_stays_a_warning() -> None:
    from fastserial.patching import install as patching

    def broken():
        raise RuntimeError("broken")

    patching.install = broken
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        import torch
    print(found[-1].message, torch.ones(1).item())


def trouble_becomes_an_error_if_asked_for() -> None:
    from fastserial.patching import install as patching

    patching.install = None
    import torch  # noqa: F401


def run_without_the_pth_file_says_so() -> None:
    from fastserial.cli.run import run
    from fastserial.errors import FastserialError

    try:
        run(["program.py"])
    except FastserialError as error:
        print(error)


def status_tells() -> None:
    import json

    import fastserial

    before = fastserial.status()
    assert before.torch is None and not before.installed and "not been called" in before.reason
    fastserial.install()
    print(json.dumps(dataclasses.asdict(fastserial.status())))
    fastserial.uninstall()
    assert "uninstall()" in fastserial.status().reason


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    globals()[name](*arguments)
