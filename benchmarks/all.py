"""Run the scripts of this folder one after the other, and keep what they found in one file.

The file is `results/DATE-MACHINE.json` beside the scripts: for each script what its `--json` has,
with command, machine and torch's version. It is written after each script, so that a run that is
broken off leaves what it has; a script that is in it is not run again. Exit status 1: a script
found something wrong, or failed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fastserial.bench.table import check_files, this_machine
from fastserial.console import say
from fastserial.errors import FastserialError

_HERE = Path(__file__).resolve().parent
_NO_SCRIPTS = {"all", "common", "models", "peers", "ranks", "scaling"}  # the last needs no folder
_SCRIPTS = sorted(path.stem for path in _HERE.glob("*.py") if path.stem not in _NO_SCRIPTS)


def main() -> int:
    """Run what is asked for, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__} The full form takes about five hours on 2 cores.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, help="its disk is measured")
    parser.add_argument("--short", action="store_true", help="half an hour; no figures to quote")
    parser.add_argument("--only", nargs="+", choices=_SCRIPTS, default=_SCRIPTS, metavar="SCRIPT")
    parser.add_argument("--results", type=Path, metavar="FILE", help="instead of that file")
    options = parser.parse_args()
    name = f"{time.strftime('%Y-%m-%d')}-{_machine()}{'-short' * options.short}.json"
    target = options.results or _HERE / "results" / name
    try:
        check_files(target)
        found: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    except (FastserialError, OSError, ValueError) as error:
        say(f"error: {error}", err=True)
        return 2
    right = True
    for script in options.only:
        if script in found:
            continue
        say(script)
        result = _run(script, options.folder, options.short)
        right &= result is not None and result.pop("right")
        if result is not None:
            found[script] = result
            target.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    say(str(target))
    return 0 if right else 1


def _run(name: str, folder: Path, short: bool) -> dict[str, Any] | None:
    """Run a script; return what it found, and whether it is `right`; None if it failed."""
    with tempfile.TemporaryDirectory() as place:
        target = Path(place, "found.json")
        words = ["--folder", str(folder.resolve()), "--json", str(target)]
        command = [sys.executable, str(_HERE / f"{name}.py"), *words, *["--short"] * short]
        status = subprocess.run(command, check=False, cwd=place).returncode
        if not target.exists():
            say(f"{name} ended with {status}", err=True)
            return None
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return {**found, "right": status == 0}


def _machine() -> str:
    """Return a name of this machine for a file: its processor, and how many cores."""
    machine = this_machine()
    words = re.findall(r"[A-Za-z0-9]+", f"{machine['cpu']} {machine['cores']} cores")
    return "-".join(words).lower()


if __name__ == "__main__":
    raise SystemExit(main())
