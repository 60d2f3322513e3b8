"""Weights in shards: the same run as one process's, checkpoints that any number of ranks reads, whole or in parts."""

import contextlib
import math
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback

import pytest
import torch
import torch.distributed.checkpoint  # noqa: F401  for the ranks, which are forked and so need not import it each
import torch.distributed.fsdp  # noqa: F401
from tiny import flags, here, make_dataset, metrics, same, weights

import checkpoint
import sample
import sharded
import train
from configurator import UserError

SHARDED = "--checkpoint_format=sharded"
# 4 micro-batches an update: an epoch ends in the seventh update.
RUN = (
    "--gradient_accumulation_steps=4", "--max_iters=12", "--lr_decay_iters=12", "--eval_iters=1",
    "--learning_rate=3e-3",  # at which a difference in the last bit stays one for so long
)  # fmt: skip


def together(ranks, main, *argv):
    """A command's main(argv) on several ranks → CompletedProcess, as torchrun would give it, without its start-up.

    With 0 ranks a process that no torchrun started, for matrix.py.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children, logs = [], []
    for rank in range(ranks or 1):
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the list
        logs.append(log)
        if not (child := os.fork()):
            code = 1
            try:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
                if ranks:
                    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
                sys.stdout = sys.stderr = log
                main(list(argv))
                code = 0
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                log.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for log in logs:
        log.seek(0)
    return subprocess.CompletedProcess(argv, max(codes, key=abs), "".join(log.read() for log in logs), "")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    assert here(train.main, *flags(data, out, *RUN)).returncode == 0
    return out


@pytest.fixture(scope="module")
def fsdp(data, tmp_path_factory):
    """The first eight updates on two ranks."""
    out = tmp_path_factory.mktemp("fsdp")
    done = together(2, train.main, *flags(data, out, *RUN, "--max_iters=8", "--strategy=fsdp"))
    assert done.returncode == 0, done.stdout
    assert "2 ranks, fsdp" in done.stdout and done.stdout.count("step 8: train loss") == 1
    return out


def assert_alike(out, alone):
    """Losses and gradient norms agree to 1e-5, of updates and of the evaluations that both made."""
    for key in (("iter", "loss"), ("iter", "grad_norm"), ("step", "val_loss"), ("step", "train_loss")):
        found, expected = metrics(out, *key), metrics(alone, *key)
        both = found.keys() & expected.keys()
        assert len(both) > 2 and all(found[at] == pytest.approx(expected[at], abs=1e-5) for at in both), key


def test_two_ranks_that_share_the_weights_give_the_losses_of_one_process(fsdp, alone):
    assert list(metrics(fsdp)) == list(range(8))
    assert_alike(fsdp, alone)


def test_their_checkpoint_is_one_process_s_and_goes_on_there(fsdp, alone, tmp_path):
    shutil.copytree(fsdp, tmp_path, dirs_exist_ok=True)
    states = [torch.load(out / "ckpt.pt", weights_only=True) for out in (fsdp, alone)]
    shapes = [[(name, w.shape) for name, w in state["model"].items()] for state in states]
    assert shapes[0] == shapes[1] and states[0].keys() == states[1].keys()
    assert states[0]["optimizer"]["state"].keys() == states[1]["optimizer"]["state"].keys()
    assert states[0]["optimizer"]["param_groups"][0]["params"] == states[1]["optimizer"]["param_groups"][0]["params"]
    assert (fsdp / "ckpt.pt").stat().st_size < 1.1 * (alone / "ckpt.pt").stat().st_size, "the tied table stands twice"
    done = here(train.main, "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=12")
    assert done.returncode == 0, done.stderr
    assert list(metrics(tmp_path)) == list(range(12))
    assert_alike(tmp_path, alone)


def test_one_process_s_checkpoint_in_parts_goes_on_on_two_ranks_and_theirs_is_sampled(data, alone, tmp_path):
    assert here(train.main, *flags(data, tmp_path, *RUN, "--max_iters=6", SHARDED)).returncode == 0
    resume = ("--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=12", "--strategy=fsdp")
    done = together(2, train.main, *resume)
    assert done.returncode == 0, done.stdout
    assert_alike(tmp_path, alone)
    assert (tmp_path / "ckpt.pt").stat().st_size < (alone / "ckpt.pt").stat().st_size / 5
    [folder] = tmp_path.glob("shards-*")
    first, second = sorted(folder.iterdir())  # a file of each rank
    for file in (first, second):
        os.rename(file, tmp_path / "hidden")
        with pytest.raises(UserError, match="isn't there whole"):
            weights_of(tmp_path)
        os.rename(tmp_path / "hidden", file)
    said = [here(sample.main, f"--out_dir={tmp_path}", "--device=cpu", "--max_new_tokens=9", "--num_samples=1")]
    in_parts = weights_of(tmp_path)
    assert here(checkpoint.main, "consolidate", str(tmp_path)).returncode == 0
    assert same(weights(tmp_path), in_parts) and same(weights(tmp_path, "best.pt"), in_parts)
    assert not list(tmp_path.glob("shards-*"))
    said += [here(sample.main, f"--out_dir={tmp_path}", "--device=cpu", "--max_new_tokens=9", "--num_samples=1")]
    assert said[0].returncode == 0 and said[0].stdout == said[1].stdout


def weights_of(out, name="ckpt.pt"):
    return checkpoint.load(str(out / name))["model"]


def test_recomputed_activations_change_no_bit_with_dropout(data, alone, fsdp, tmp_path):
    recompute = "--activation_checkpointing=True"
    assert here(train.main, *flags(data, tmp_path / "1", *RUN, recompute)).returncode == 0
    assert metrics(tmp_path / "1") == metrics(alone) and same(weights(tmp_path / "1"), weights(alone))
    done = together(2, train.main, *flags(data, tmp_path / "2", *RUN, "--max_iters=8", "--strategy=fsdp", recompute))
    assert done.returncode == 0, done.stdout
    assert metrics(tmp_path / "2") == metrics(fsdp) and same(weights(tmp_path / "2"), weights(fsdp))


def test_activations_are_recomputed_one_block_at_a_time(data, tmp_path, monkeypatch):
    calls, forward = [0], train.GPT.hidden.__globals__["Block"].forward

    def counted(self, x, cache=None):
        calls[0] += self.training
        return forward(self, x, cache)

    monkeypatch.setattr(train.GPT.hidden.__globals__["Block"], "forward", counted)
    for recompute, times in ((False, 1), (True, 2)):
        calls[0] = 0
        argv = flags(data, tmp_path, "--max_iters=2", f"--activation_checkpointing={recompute}")
        assert here(train.main, *argv).returncode == 0
        assert calls[0] == times * 2 * 2 * 2  # updates, micro-batches, blocks


def test_a_process_alone_has_nothing_to_share_and_runs_as_ever(data, alone, tmp_path):
    assert here(train.main, *flags(data, tmp_path, *RUN, "--strategy=fsdp")).returncode == 0
    assert metrics(tmp_path) == metrics(alone) and same(weights(tmp_path), weights(alone))


def test_muon_gathers_a_matrix_before_it_makes_it_orthogonal(data, tmp_path):
    recipe = (*RUN, "--optimizer=muon", "--max_iters=5", "--eval_interval=2")
    assert here(train.main, *flags(data, tmp_path / "1", *recipe)).returncode == 0
    done = together(2, train.main, *flags(data, tmp_path / "2", *recipe, "--strategy=fsdp"))
    assert done.returncode == 0, done.stdout
    assert_alike(tmp_path / "2", tmp_path / "1")
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    assert all(torch.allclose(one[name], two[name], atol=1e-5, rtol=0) for name in one)


def test_the_average_of_shards_is_that_of_one_process_and_the_best_also_in_parts(data, tmp_path):
    recipe = (*RUN, "--decay_lr=False", "--learning_rate=2e-2", "--ema_decay=0.6", "--eval_iters=0", "--max_iters=16")
    assert here(train.main, *flags(data, tmp_path / "1", *recipe)).returncode == 0
    done = together(2, train.main, *flags(data, tmp_path / "2", *recipe, "--strategy=fsdp", SHARDED))
    assert done.returncode == 0, done.stdout
    averages = [metrics(tmp_path / ranks, "step", "average_loss") for ranks in "12"]
    assert averages[1] == pytest.approx(averages[0], abs=1e-5) and len(averages[0]) == 5
    assert averages[0][16] < metrics(tmp_path / "1", "step", "val_loss")[16]
    best, latest = weights_of(tmp_path / "2", "best.pt"), checkpoint.load(str(tmp_path / "2" / "ckpt.pt"))
    assert all(torch.equal(best[name], average) for name, average in latest["average"].items())
    assert not same(best, latest["model"])
    assert here(checkpoint.main, "consolidate", str(tmp_path / "2")).returncode == 0
    assert same(weights(tmp_path / "2", "best.pt"), best) and same(weights(tmp_path / "2"), latest["model"])


def test_a_nan_on_one_rank_skips_the_update_on_all(data, tmp_path, monkeypatch):
    forward, calls = train.GPT.forward, [0]

    def spoiled(self, idx, targets=None):
        calls[0] += self.training
        return forward(self, idx, targets) * (math.nan if calls[0] == 5 and os.environ["RANK"] == "1" else 1)

    monkeypatch.setattr(train.GPT, "forward", spoiled)
    done = together(2, train.main, *flags(data, tmp_path, *RUN, "--max_iters=4", "--strategy=fsdp"))
    assert done.returncode == 0 and "1 update(s) skipped" in done.stdout, done.stdout
    state = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert all(w.isfinite().all() for w in state["model"].values())
    assert {int(moments["step"].item()) for moments in state["optimizer"]["state"].values()} == {3}


def test_only_the_main_rank_holds_a_whole_copy():
    def main(argv):
        import torch.distributed as dist
        from torch.distributed.tensor import Shard, distribute_tensor

        from runtime import Runtime, RuntimeConfig

        rt = Runtime(RuntimeConfig(device="cpu"))
        mesh = dist.init_device_mesh("cpu", (2,))
        rows = torch.arange(10.0).view(5, 2)
        found = rt.gather({"a": {0: distribute_tensor(rows, mesh, [Shard(0)])}, "b": "text"})
        assert found["b"] == "text"
        assert torch.equal(found["a"][0], rows) if rt.is_main else found["a"][0] is None
        assert rt.all_finite([torch.ones(2)]) and not rt.all_finite([torch.tensor([1.0, math.nan][rt.rank])])
        rt.close()

    done = together(2, main)
    assert done.returncode == 0, done.stdout


# ---- a folder of shards


@pytest.fixture(scope="module")
def parts(data, tmp_path_factory):
    """out_dir of a run of one process that kept two checkpoints, of 4 and 6 updates, in parts."""
    out = tmp_path_factory.mktemp("parts")
    argv = flags(data, out, *RUN, "--max_iters=6", SHARDED, "--keep_checkpoints=2")
    assert here(train.main, *argv).returncode == 0
    return out


@pytest.fixture
def copy(parts, tmp_path):
    return shutil.copytree(parts, tmp_path / "out")


def test_a_folder_stays_as_long_as_a_checkpoint_names_it(parts, copy):
    assert sorted(path.name for path in parts.glob("shards-*")) == ["shards-00000004", "shards-00000006"]
    assert checkpoint.load(str(parts / "ckpt-00000004.pt"))["iter_num"] == 4
    assert not same(weights_of(parts), weights_of(parts, "ckpt-00000004.pt"))
    os.remove(copy / "ckpt-00000004.pt")
    checkpoint.OutDir(str(copy), new_run=False).drop_shards()
    assert [path.name for path in copy.glob("shards-*")] == ["shards-00000006"]


def test_a_new_run_sets_a_former_one_aside_with_its_shards(data, copy):
    former = weights_of(copy)
    assert here(train.main, *flags(data, copy, "--max_iters=2", SHARDED)).returncode == 0
    assert same(weights_of(copy / "previous-1"), former) and not same(weights_of(copy), former)
    assert [path.name for path in copy.glob("shards-*")] == ["shards-00000002"]


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


def test_nothing_in_a_folder_is_unpickled(copy, monkeypatch):
    monkeypatch.chdir(copy)
    [file] = (copy / "shards-00000006").iterdir()
    assert file.suffix == ".safetensors"
    for name in (".metadata", "__0_0.distcp", "model.safetensors.index.json"):  # what DCP's other readers look for
        (copy / "shards-00000006" / name).write_bytes(pickle.dumps(Bomb()))
    weights_of(copy)
    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match="which can't be read"):
        weights_of(copy)
    assert not (copy / "exploded").exists()


def test_what_is_missing_or_torn_or_elsewhere_ends_in_one_line(copy):
    [file] = (copy / "shards-00000006").iterdir()
    content, index = file.read_bytes(), torch.load(copy / "ckpt.pt", weights_only=True)

    def refused(match):
        done = here(train.main, "--init_from=resume", f"--out_dir={copy}")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and match in done.stderr, done.stderr

    for torn in (content[:-1], content[: len(content) // 2], b""):
        file.write_bytes(torn)
        refused("which can't be read")
    file.unlink()
    refused("isn't there whole")
    file.write_bytes(content)
    for name in ("../shards-00000006", "/etc", 3):
        torch.save({**index, "shards": name}, copy / "ckpt.pt")
        refused("'shards' can't be")
    index["model"]["transformer.wte.weight"] = torch.empty(10**9, 16, device="meta")
    torch.save(index, copy / "ckpt.pt")
    refused("isn't there whole")


@pytest.mark.parametrize("new_run", [True, False])
def test_a_run_that_dies_between_any_two_steps_of_a_save_leaves_one_that_loads(parts, tmp_path, monkeypatch, new_run):
    """A new run's first save does the most; the former one's files must all be somewhere."""
    former = {path.read_bytes() for path in parts.rglob("*") if path.is_file()}
    index = {**torch.load(parts / "ckpt.pt", weights_only=True), "iter_num": 7}
    for at in range(100):
        copy, calls = shutil.copytree(parts, tmp_path / str(at)), [0]
        shutil.copytree(copy / "shards-00000006", copy / sharded.TEMPORARY)
        out = checkpoint.OutDir(str(copy), new_run)
        for name in ("replace", "rename", "remove", "link", "mkdir", "rmdir"):
            real = getattr(os, name)

            def dies(*args, real=real, calls=calls, at=at, **kwargs):
                calls[0] += 1
                if calls[0] > at:
                    raise KeyboardInterrupt
                return real(*args, **kwargs)

            monkeypatch.setattr(os, name, dies)
        with contextlib.suppress(KeyboardInterrupt):
            out.save(index, best=index, shards=str(copy / sharded.TEMPORARY))
        monkeypatch.undo()
        for path in copy.glob("*.pt"):
            assert checkpoint.load(str(path))["iter_num"] in (4, 6, 7)
        assert (copy / "ckpt.pt").exists()
        if new_run:
            assert former <= {path.read_bytes() for path in copy.rglob("*") if path.is_file()}
        if calls[0] <= at:
            break
    assert 3 < at < 99, "every step was tried"


def test_a_disk_that_fails_costs_a_save_and_not_the_run(data, tmp_path, monkeypatch):
    write, calls = sharded.Writer.write_data, [0]

    def fails(self, *args):
        calls[0] += 1
        if calls[0] == 2:
            raise OSError("no space left")
        return write(self, *args)

    monkeypatch.setattr(sharded.Writer, "write_data", fails)
    done = here(train.main, *flags(data, tmp_path, *RUN, SHARDED))
    assert done.returncode == 0 and done.stdout.count("no space left") == 1, done.stdout
    assert "the former one stays: rank 0: no space left. It needs 0.1 MB" in done.stdout
    assert checkpoint.load(str(tmp_path / "ckpt.pt"))["iter_num"] == 12
    monkeypatch.setattr(sharded.Writer, "write_data", lambda self, *args: fails(calls.__setitem__(0, 1)))
    done = here(train.main, "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=13")
    assert done.returncode == 1 and checkpoint.load(str(tmp_path / "ckpt.pt"))["iter_num"] == 12
    assert not (tmp_path / sharded.TEMPORARY).exists()
