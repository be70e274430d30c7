"""The mirror of a Checkpointer in a bucket of a real S3 server, also over a bad network."""

from __future__ import annotations

import http.client
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from support import processes

import fastserial
from fastserial import Checkpointer
from fastserial.errors import CorruptCheckpointError
from fastserial.files import remote
from fastserial.files.remote import remote_folder

pytest.importorskip("obstore")
pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")

FAILING = 0.3  # of all requests


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to the server; some get an error, of others the connection is cut."""

    protocol_version = "HTTP/1.1"
    target = ""
    failing = 0.0
    dice = random.Random(1)
    failed = 0

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        luck = self.dice.random()
        if luck < self.failing:
            type(self).failed += 1
            self.close_connection = True
            if luck < self.failing / 2:
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
            return
        connection = http.client.HTTPConnection(self.target, timeout=60)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        head = self.command == "HEAD"
        length = answer.getheader("Content-Length") if head else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(data)
        connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with processes.start("-m", "moto.server", "-p", port, stderr=-3) as running:
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < until, "the server does not start"
                time.sleep(0.1)
        yield f"127.0.0.1:{port}"
        running.kill()


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Proxy]]:
    """What is between fastserial and the server."""
    handler = type("Handler", (Proxy,), {"target": server, "failed": 0})
    front = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "us-east-1"}
    address = f"http://127.0.0.1:{front.server_port}"
    for name, value in {**keys, "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=f"http://{server}")
    client.create_bucket(Bucket="runs")
    yield handler
    front.shutdown()
    front.server_close()


@pytest.mark.parametrize("failing", [0.0, FAILING], ids=["good network", "bad network"])
def test_a_run_goes_on_from_the_bucket(tmp_path: Path, proxy: type[Proxy], failing: float) -> None:
    proxy.failing = failing
    local, url = tmp_path / "run", f"s3://runs/{tmp_path.name}"
    weight = torch.zeros(6_000_000)  # several parts
    with Checkpointer(local, {"weight": weight}, keep=2, mirror=url) as checkpointer:
        for step in range(1, 5):
            weight.fill_(step)
            checkpointer.save(step)
            checkpointer.wait()
    copies = sorted({*remote_folder(url, 60.0).sizes()} - {".fastserial.run"})
    names = [f"step-0000000{step}.pt" for step in (3, 4)]
    assert copies == sorted([*names, *(f"{name}.json" for name in names)])
    expected = (local / names[-1]).read_bytes()
    shutil.rmtree(local)
    weight.zero_()
    with Checkpointer(local, {"weight": weight}, keep=2, mirror=url) as checkpointer:
        assert checkpointer.resume() == 4
    assert (local / names[-1]).read_bytes() == expected
    assert weight.eq(4).all()
    assert bool(proxy.failed) == bool(failing)
    newest = f"{url}/{names[-1]}"  # and read where it is
    assert fastserial.verify(newest).ok
    assert torch.equal(fastserial.load(newest)["weight"], weight)
    with fastserial.open(newest) as file:
        assert torch.equal(file.get_slice("weight")[5:9], weight[5:9])


@pytest.mark.parametrize("package", ["obstore", "s3fs"])
def test_objects_that_are_replaced(
    tmp_path: Path, proxy: type[Proxy], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package == "s3fs":
        pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
        monkeypatch.setattr(remote, "_OBSTORE_SCHEMES", set())
    client = boto3.client("s3", endpoint_url=f"http://{proxy.target}")
    url = f"s3://runs/{package}.pt"
    opened = []
    for value in (1.0, 2.0):
        weight = torch.full((3_000_000,), value)  # two parts
        torch.save({"weight": weight}, tmp_path / "x.pt")
        client.upload_file(str(tmp_path / "x.pt"), "runs", f"{package}.pt")
        assert torch.equal(fastserial.load(url)["weight"], weight)
        assert fastserial.verify(url).ok
        opened.append(fastserial.open(url))
    with pytest.raises(CorruptCheckpointError, match="changed while it was read"):
        opened[0].get_tensor("weight")
