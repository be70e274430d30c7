"""`fastserial.load`: torch.load through fastserial, installed or not."""

from __future__ import annotations

import io
import os
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fastserial.checkpoints.lazy import open_checkpoint
from fastserial.checkpoints.verify import refuse_damaged
from fastserial.config import current, options
from fastserial.errors import CorruptCheckpointError, UnreadableCheckpointError
from fastserial.files.remote import ReadAhead, RemoteSource, is_url
from fastserial.files.sources import stamp
from fastserial.interrupts import ours
from fastserial.loading.session import unverified_error, verify_request
from fastserial.patching.install import installed, patched
from fastserial.reports import warn_unmet

_NAMES = ("_load", "_open_file_like")


def load(f: Any, *args: Any, verify: bool | None = None, **kwargs: Any) -> Any:
    """Return what `torch.load(f, ...)` returns, with the same arguments and errors.

        state = fastserial.load("ckpt.pt", verify=True)

    Args:
        f: a path or a file object; also the URL (`s3://…`) of a zip or safetensors file, without
            `verify`.
        args: as `torch.load`.
        kwargs: as `torch.load`.
        verify: compare the CRC-32 of every record that is read, or, with `mmap=True`, mapped; an
            error where that is impossible. Zip files that were written with checksums have them;
            legacy and safetensors files have none. Default: the option `verify_on_load`, which
            only warns; `last_load_report().verified` says whether it was done.

    Raises:
        ConfigError: `verify`, and the checksums of this file cannot be compared.
        CorruptCheckpointError: a record is damaged (`verify`), or the file is hostile, or it
            changed while it was read. A `RuntimeError`.
        Exception: whatever `torch.load` raises.
    """
    wanted = current().verify_on_load if verify is None else verify
    lacking = _lacking(f) if wanted else None
    if lacking is not None:
        if verify:
            raise unverified_error(f, lacking)
        warn_unmet("verify_on_load", lacking)
        wanted = False
    if is_url(f):
        with options(verify_on_load=False):
            return (_safetensors if f.endswith(".safetensors") else _remote)(f, *args, **kwargs)
    function = _function()
    if wanted and function is torch.load and not installed():
        return _verified(function, f, bool(verify), *args, **kwargs)
    with options(verify_on_load=wanted):
        if not verify:
            return function(f, *args, **kwargs)
        with verify_request() as request:
            found = function(f, *args, **kwargs)
    if not request.is_met:
        raise unverified_error(f, "it is no zip file of tensors")
    return found


def _lacking(f: Any) -> str | None:
    """Return why a file has no checksums that a load could compare, as far as its name says."""
    name = os.fspath(f) if isinstance(f, str | os.PathLike) else ""
    if isinstance(name, str) and name.endswith(".safetensors"):
        return "safetensors files have no checksums"
    if is_url(f):
        return "a load from a URL compares no checksums: call `fastserial.verify` with it"
    return None


def _remote(url: str, *args: Any, **kwargs: Any) -> Any:
    source = RemoteSource(url)
    ahead = ReadAhead(source)
    try:
        with io.BufferedReader(ahead) as file:
            found = torch.load(file, *args, **kwargs)
    except ours(Exception):
        if ahead.failed is None:
            source.check_unchanged()
            raise
    if ahead.failed is not None:
        raise ahead.failed
    source.check_unchanged()
    return found


def _safetensors(url: str, map_location: Any = None, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
    """Return what `torch.load` returns for a path of this name."""
    if not isinstance(map_location, str | torch.device | None):
        text = "of a safetensors file, `map_location` is a device; or use `fastserial.open`"
        raise UnreadableCheckpointError(text, path=url)
    with open_checkpoint(url, map_location or "cpu") as file:
        if file.container != "safetensors":
            raise UnreadableCheckpointError("not a safetensors file", path=url)
        with ThreadPoolExecutor(4) as threads:
            return dict(zip(file.keys(), threads.map(file.get_tensor, file.keys()), strict=True))


def _verified(function: Any, f: Any, required: bool, *args: Any, **kwargs: Any) -> Any:
    """Verify a file in a separate pass, for a torch without a patch, and load the same file.

    Args:
        function: loads it.
        required: raise if it cannot be verified.

    Raises:
        ConfigError: it cannot.
        CorruptCheckpointError: it is damaged, or changed meanwhile.
    """
    if not isinstance(f, str | os.PathLike):
        found, why = function(f, *args, **kwargs), "this torch has no patch: give it a path"
        return _unverified(found, f, why, required)
    with open(f, "rb") as file:
        seen = stamp(file.fileno())
        report = refuse_damaged(f, file.fileno())
        # the path may have another file by now; for `mmap=True` torch needs one
        name = f"/proc/self/fd/{file.fileno()}"
        found = function(name if os.path.exists(name) else file, *args, **kwargs)
        if not seen.holds_for(file.fileno()):
            raise CorruptCheckpointError("the file changed while it was read", path=os.fspath(f))
    if report.fully_checked:
        return found
    return _unverified(found, f, "; ".join(report.notes) or report.status, required)


def _unverified(found: Any, f: Any, why: str, required: bool) -> Any:
    if required:
        raise unverified_error(f, why)
    warn_unmet("verify_on_load", why)
    return found


def _function() -> Any:
    """Return torch.load, or a copy that calls our functions if they are not installed."""
    function = torch.load
    if installed() or not isinstance(function, types.FunctionType):
        return function
    ours = {name: patched(name) for name in _NAMES}
    home = vars(torch.serialization)
    if function.__globals__ is not home or None in ours.values():
        return function  # replaced by other code, or a torch without a patch
    copy = types.FunctionType(
        function.__code__, {**home, **ours}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
