"""fetch.py: what comes from outside is what was asked for, within a bounded time, or an OSError."""

import hashlib
import http.server
import importlib.util
import os
import stat
import threading
import time
import zipfile

import pytest

import fetch

CONTENT = b"To be, or not to be"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if self.path == "/missing" else 200)
        self.end_headers()
        if self.path == "/drip":  # each read succeeds, so only a bound on the whole helps
            for _ in range(100):
                try:
                    self.wfile.write(b".")
                    self.wfile.flush()
                except OSError:
                    return
                time.sleep(0.1)
        self.wfile.write(CONTENT)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    """The address of an HTTP server on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        httpd.daemon_threads = True
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_download_returns_the_bytes(server):
    assert fetch.download(f"{server}/text", SHA256) == CONTENT


@pytest.mark.parametrize("path, sha256", [("text", "0" * 64), ("missing", SHA256)])
def test_other_bytes_and_error_pages_are_refused_by_name(server, path, sha256):
    with pytest.raises(OSError, match=f"{server}/{path}"):
        fetch.download(f"{server}/{path}", sha256)


def test_a_server_that_drips_does_not_outlast_the_timeout(server):
    start = time.monotonic()
    with pytest.raises(OSError, match="no answer in 0.5 seconds"):
        fetch.download(f"{server}/drip", SHA256, timeout=0.5)
    assert time.monotonic() - start < 3


def test_an_address_that_is_none_is_an_oserror():
    with pytest.raises(OSError):
        fetch.download("http://localhost:1/closed", SHA256)
    with pytest.raises(OSError):
        fetch.download("no address", SHA256)


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that pip finds, and nothing else: its index is a folder. Importing it would fail the test."""
    info = "plain_plays-1.0.dist-info"
    path = tmp_path / "index" / "plain_plays-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("plain_plays/__init__.py", "raise SystemExit('imported')")
        archive.writestr("plain_plays/hamlet.md", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: plain-plays\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_wheel_is_read_without_being_installed(wheel):
    name = "plain_plays/hamlet.md"
    assert fetch.wheel_members("plain-plays==1.0", wheel, [name]) == {name: CONTENT}
    assert importlib.util.find_spec("plain_plays") is None


def test_another_wheel_of_that_name_is_refused(wheel):
    with pytest.raises(OSError, match="sha256"):
        fetch.wheel_members("plain-plays==1.0", "0" * 64, ["plain_plays/hamlet.md"])


def test_a_wheel_that_the_index_lacks_is_named_in_one_line(wheel):
    with pytest.raises(OSError, match="plain-plays==2.0") as caught:
        fetch.wheel_members("plain-plays==2.0", wheel, [])
    assert "\n" not in str(caught.value)


def test_a_pip_that_hangs_is_ended(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(fetch.sys, "executable", str(python))
    start = time.monotonic()
    with pytest.raises(OSError, match="not done in 0.2 seconds"):
        fetch.wheel_members("plain-plays==1.0", SHA256, [], timeout=0.2)
    assert time.monotonic() - start < 5


def test_a_failed_write_leaves_the_old_file_and_no_scraps(tmp_path, monkeypatch):
    path = tmp_path / "new folder" / "file"
    fetch.write_whole(path, b"old")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        fetch.write_whole(path, b"new")
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]
