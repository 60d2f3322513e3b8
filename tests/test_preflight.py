"""Ranks meet, compare what they are, and measure what is between them."""

import contextlib
import json
import os
import shutil
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from tiny import flags, here, make_dataset, run

import runtime
import train
from runtime import Runtime, RuntimeConfig


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def on_ranks(*bodies, **environment):
    """Fork a process for each body, a function without arguments, as rank 0, 1, … → what they return, as JSON."""
    environment = {
        "WORLD_SIZE": len(bodies), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "LOCAL_RANK": 0,
        **environment,
    }  # fmt: skip
    pipes, children = [], []
    for rank, body in enumerate(bodies):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.environ.update({name: str(value) for name, value in {**environment, "RANK": rank}.items()})
                os.write(writer, json.dumps(body()).encode())
            except BaseException as error:
                os.write(writer, json.dumps(f"{type(error).__name__}: {error}").encode())
            finally:
                os._exit(0)
        os.close(writer)
        pipes.append(reader)
        children.append(child)
    answers = []
    for reader in pipes:
        with os.fdopen(reader, encoding="utf-8") as file:
            answers.append(json.loads(file.read()))
    for child in children:
        os.waitpid(child, 0)
    return answers


@contextlib.contextmanager
def agents_store():
    """A store as torchrun's agent has one, in a process of its own → what `on_ranks` needs to find it.

    Not in this process: its thread may hold a lock of libc's just when a rank is forked, and that rank waits forever.
    """
    port = free_port()
    if not (child := os.fork()):
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        time.sleep(1000)
        del store
    try:
        yield {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def command(*argv, change=lambda: None, **environment):
    """A body that runs train.py --preflight → [exit code, stdout, stderr]."""

    def body():
        change()
        os.environ.update(environment)
        done = here(train.main, "--preflight=True", "--timeout=0.5", *argv)
        return done.returncode, done.stdout, done.stderr

    return body


def test_two_ranks_under_torchrun_pass(data, tmp_path):
    done = run("train.py", *flags(data, tmp_path / "out", "--preflight=True"), ranks=2)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (
            f"rank {rank} of 2: {socket.gethostname()}, cpu (cpu), torch.float32, torch {torch.__version__}"
            in done.stdout
        )
    assert "all-reduce of 64 MB in" in done.stdout and "GB/s bus bandwidth" in done.stdout
    assert done.stdout.count("preflight passed") == 1 and not (tmp_path / "out").exists()


def test_whatever_differs_is_named_with_its_ranks(data, tmp_path):
    other = shutil.copytree(data, tmp_path / "tiny")
    with open(other / "train.bin", "ab") as file:
        file.write(b"\0\0")
    (other / "meta.json").unlink()
    same = flags(data, tmp_path / "out")
    answers = on_ranks(
        command(*same),
        command(*same),
        command(
            *flags(other, tmp_path / "out", "--batch_size=8", "--dtype=bfloat16"),
            change=lambda: setattr(torch, "__version__", "2.12.0"),
        ),
    )
    assert [code for code, _, _ in answers] == [2, 2, 2]
    for _, out, err in answers:
        assert "preflight passed" not in out
        assert f"the ranks differ in torch: {torch.__version__} on ranks 0, 1, 2.12.0 on rank 2" in err
        assert "in --batch_size: 4 on ranks 0, 1, 8 on rank 2" in err
        assert "in dtype: torch.float32 on ranks 0, 1, torch.bfloat16 on rank 2" in err
        assert "in data: train.bin" in err and "in --seed" not in err and "world size" not in err


@pytest.mark.parametrize("first, second", [(2, 3), (3, 2)])
def test_ranks_that_count_differently_are_told_so_at_once(data, tmp_path, first, second):
    argv = flags(data, tmp_path / "out")
    # A store that is there already, as torchrun's is: rank 0's own would wait for all that it expects.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    answers = on_ranks(
        command(*argv, WORLD_SIZE=str(first)), command(*argv, WORLD_SIZE=str(second)), MASTER_PORT=store.port,
        TORCHELASTIC_USE_AGENT_STORE=True,
    )  # fmt: skip
    for code, _, err in answers:
        assert code == 2 and f"the ranks differ in world size: {first} on rank 0, {second} on rank 1" in err


def test_a_wrong_sum_is_found(data, tmp_path, monkeypatch):
    argv = flags(data, tmp_path / "out")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: tensor.mul_(2))
    answers = on_ranks(command(*argv), command(*argv))
    assert all(code == 2 and "the sum over ranks is wrong" in err for code, _, err in answers), answers


def test_data_that_no_rank_has_and_a_device_that_one_lacks_are_named(tmp_path, data):
    assert here(train.main, *flags(tmp_path, tmp_path / "out", "--preflight=True")).returncode == 2
    answer = on_ranks(command(*flags(data, tmp_path / "out", "--device=cuda"), LOCAL_RANK="3"))[0]
    assert answer[0] == 2 and "--device=cuda can't be used here" in answer[2]


def test_attempts_do_not_meet_each_other_whatever_torchrun_counts():
    """One store for two attempts, as under torchrun; in the second, the two agents' restart counts differ."""

    def body(restarts):
        def sum_of_ones():
            os.environ["TORCHELASTIC_RESTART_COUNT"] = restarts
            rt = Runtime(RuntimeConfig(device="cpu", timeout=0.2))
            return rt.sum(torch.ones(1)).item()

        return sum_of_ones

    with agents_store() as place:
        assert on_ranks(body("0"), body("0"), body("0"), **place) == [3, 3, 3]
        assert on_ranks(body("1"), body("0"), **place) == [2, 2]


def test_a_rank_that_does_not_come_is_named():
    with agents_store() as place:
        answers = on_ranks(lambda: runtime.meet({}, 0.03), **place, WORLD_SIZE=3)
    assert answers == ["UserError: ranks 1, 2 didn't come within --timeout=0.03 minutes"]


def test_a_single_process_passes_too(data, tmp_path):
    done = here(train.main, *flags(data, tmp_path / "out", "--preflight=True"))
    assert done.returncode == 0 and "preflight passed" in done.stdout, done.stderr
