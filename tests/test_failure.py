"""Machines that hang, die, come and go: a run says so, and goes on with whoever is left."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import ROOT, flags, here, make_dataset, metrics

import train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny")


def python(*arguments, **environment):
    """A process in a group of its own, its output in a pipe."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def workers(agent):
    return [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]


def pull_the_plug(agent):
    """torchrun's workers outlive it, those of a machine don't."""
    for pid in (*workers(agent), agent.pid) if agent.poll() is None else ():
        os.kill(pid, signal.SIGKILL)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(agent, text):
    """Read its output until a line contains `text` → that line."""
    read = []
    for line in agent.stdout:
        read.append(line)
        if text in line:
            return line
    pytest.fail(f"it ended without saying {text!r}:\n" + "".join(read[-30:]))


def test_a_hung_rank_ends_the_others_in_a_clear_time_out(data, tmp_path):
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = flags(data, tmp_path, "--max_iters=100000", "--timeout=0.2")
    waits, hangs = (python(ROOT / "train.py", *argv, **place, RANK=str(rank)) for rank in range(2))
    try:
        wait_for(waits, "iter 3:")
        os.kill(hangs.pid, signal.SIGSTOP)
        began = time.monotonic()
        line = wait_for(waits, "lost another one")
        assert 10 < time.monotonic() - began < 40
        assert line.startswith("rank 0 of 2 lost") and "within --timeout=0.2 minutes, in " in line
        assert "(runtime.py:" in line or "(train.py:" in line
        assert "Traceback" not in waits.stdout.read() and waits.wait(timeout=60) == 1
    finally:
        for process in (waits, hangs):
            process.kill()


def test_a_world_that_shrinks_goes_on_alone_with_the_losses_of_an_undisturbed_run(data, tmp_path):
    """Two torchruns stand for two machines, and one of them dies."""
    recipe = ("--max_iters=60", "--gradient_accumulation_steps=4", "--eval_interval=5", "--init_from=auto")
    command = [
        "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv_id=test",
        "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    training = [ROOT / "train.py", *flags(data, tmp_path / "out", *recipe)]
    how = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # docs/cluster.md says why

    def machine(is_host):
        # On one host both would take the rendezvous for theirs, and the one that dies might get it.
        patience = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
        return python(*command, f"--rdzv_conf={patience},is_host={is_host}", *training, **how)

    agents = [machine(is_host=True), machine(is_host=False)]  # the older one gets rank 0
    try:
        assert here(train.main, *flags(data, tmp_path / "alone", *recipe)).returncode == 0
        while "2 ranks" not in wait_for(agents[0], "parameters on"):
            pass  # it may have begun alone
        wait_for(agents[0], "saved")
        pull_the_plug(agents[1])
        wait_for(agents[0], "rank 0 of 2 lost another one")
        assert "ranks" not in wait_for(agents[0], "parameters on")
        rest = agents[0].stdout.read()
        assert agents[0].wait(timeout=60) == 0 and "iter 59: loss" in rest and "iter 0:" not in rest, rest
    finally:
        for agent in agents:
            pull_the_plug(agent)
    found, expected = metrics(tmp_path / "out"), metrics(tmp_path / "alone")
    assert list(found) == list(expected) and list(found.values()) == pytest.approx(list(expected.values()), abs=1e-5)
