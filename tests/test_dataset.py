"""dataset.py: what is written is what is read, each token has its turn, and broken data is refused by name."""

import json
import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dataset
from configurator import UserError
from dataset import Dataset, sample_starts, write_dataset
from tokenizer import ByteTokenizer, CharTokenizer, GPT2Tokenizer, Tokenizer


class Numbers(Tokenizer):
    """As many ids as a test wants; looks like a character vocabulary from outside."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def describe(self):
        return {"type": "char", "chars": "".join(map(chr, range(0x10000, 0x10000 + self.vocab_size)))}


def counting(folder, n_train, n_val, B=4, T=8, seed=1):
    """A data set whose token at position i is i: what a batch holds tells where it was read."""
    splits = {"train": [np.arange(n_train)], "val": [np.arange(n_val)]}
    write_dataset(folder, splits, Numbers(max(n_train, n_val)), "counted")
    return Dataset(folder, T, B, seed)


def starts_of(n, T, samples, seed=1):
    return sample_starts(np.asarray(samples, dtype=np.uint64), n, T, seed).astype(int)


# --- writing and reading ---


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, "<u2"), (2**16 + 1, "<u4")])
def test_ids_are_written_little_endian_and_described(tmp_path, vocab_size, dtype):
    ids = [0, 1, vocab_size - 1, 258] * 5
    splits = {"train": (ids[i : i + 3] for i in range(0, 20, 3)), "val": [ids[:10], [], ids[10:]]}
    tokenizer = Numbers(vocab_size)
    meta = write_dataset(tmp_path, splits, tokenizer, source="here", sha256="abc")
    for split in ("train", "val"):
        assert np.frombuffer((tmp_path / f"{split}.bin").read_bytes(), dtype).tolist() == ids
    assert meta == json.loads((tmp_path / "meta.json").read_text()) == {
        "dtype": np.dtype(dtype).name, "vocab_size": vocab_size, "tokenizer": tokenizer.describe(),
        "tokens": {"train": 20, "val": 20}, "source": "here", "sha256": "abc",
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"train.bin", "val.bin", "meta.json"}
    data = Dataset(tmp_path, block_size=4, batch_size=1)
    assert (data.vocab_size, data.tokens) == (vocab_size, {"train": 20, "val": 20})
    assert data.tokenizer.describe() == tokenizer.describe()


@pytest.mark.parametrize("bad", [-1, 256, 2**16 + 5])
def test_an_id_that_the_tokenizer_lacks_is_never_written(tmp_path, bad):
    write_dataset(tmp_path, {"train": [range(50)], "val": [range(50)]}, ByteTokenizer(), "old")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="outside"):
        write_dataset(tmp_path, {"train": [[1]], "val": [[bad]]}, ByteTokenizer(), "new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("renames", range(5))
def test_an_interruption_leaves_the_old_set_or_a_refused_one_or_the_new(tmp_path, monkeypatch, renames):
    """Killed before rename number 0 … 3 (a marker, two token files, meta.json), or not at all."""
    old, new = {"train": [range(50)], "val": [range(50)]}, {"train": [[7] * 50], "val": [[7] * 50]}
    write_dataset(tmp_path, old, ByteTokenizer(), "old")
    replace, done = os.replace, []

    def until_killed(*args):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(replace(*args))

    monkeypatch.setattr(os, "replace", until_killed)
    try:
        write_dataset(tmp_path, new, CharTokenizer("abcdefgh"), "new")
    except KeyboardInterrupt:
        assert renames < 4
    monkeypatch.undo()
    if 0 < renames < 4:
        with pytest.raises(UserError, match="never finished"):
            Dataset(tmp_path, 8, 2)
    else:
        assert Dataset(tmp_path, 8, 2).vocab_size == (256 if renames == 0 else 8)


# --- the order of training ---


def test_targets_are_the_inputs_one_token_later(tmp_path):
    data = counting(tmp_path, 300, 50)
    x, y = data.batch("train", 0)
    assert x.shape == y.shape == (4, 8) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(8))


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40))
def test_blocks_are_permuted(n, seed, epoch):
    key = dataset._mix(np.full(n, seed ^ epoch, dtype=np.uint64))
    assert sorted(dataset._permute(np.arange(n, dtype=np.uint64), n, key)) == list(range(n))


@given(n=st.integers(2, 2000), T=st.integers(1, 64), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_an_epoch_deals_blocks_that_do_not_overlap_and_leaves_out_less_than_two(n, T, seed, epoch):
    n = max(n, T + 1)
    n_blocks = max(1, (n - T) // T)
    starts = np.sort(starts_of(n, T, np.arange(n_blocks) + epoch * n_blocks, seed))
    assert starts[0] >= 0 and starts[-1] + T + 1 <= n  # the last target is in the file too
    assert (np.diff(starts) == T).all()
    assert n - n_blocks * T <= 2 * T


@pytest.mark.parametrize("n, T", [(9, 8), (16, 8), (17, 8), (23, 8), (24, 8), (100, 8), (101, 1)])
def test_over_the_epochs_each_token_is_an_input_and_each_but_the_first_a_target(n, T):
    seen = {start + t for start in starts_of(n, T, range(2000 * max(1, n // T))) for t in range(T)}
    assert seen == set(range(n - 1))


def test_orders_and_offsets_differ_between_epochs_and_seeds():
    blocks = 100
    samples = np.arange(9 * blocks).reshape(9, blocks)
    epochs = [tuple(starts_of(8 * (blocks + 1), 8, epoch, seed)) for epoch in samples for seed in (1, 2)]
    assert len(set(epochs)) == 18
    assert len({min(epoch) for epoch in epochs}) > 4  # offsets
    orders = [tuple(np.argsort(epoch)) for epoch in epochs]
    assert len(set(orders)) == 18


def test_the_order_looks_random():
    """Each block comes first equally often (χ², 99 degrees of freedom), and neighbours are not dealt as neighbours."""
    blocks, epochs = 100, 5000
    starts = starts_of(8 * (blocks + 1), 8, np.arange(epochs) * blocks) // 8
    counts = np.bincount(starts, minlength=blocks)
    assert ((counts - epochs / blocks) ** 2 / (epochs / blocks)).sum() < 150  # p = 0.0007
    order = starts_of(8 * 10_001, 8, np.arange(10_000))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert (np.diff(order) == 8).sum() < 10


def test_the_order_is_the_same_on_every_machine():
    starts = starts_of(1_003_854, 256, [0, 1, 2, 10**6, 10**12], seed=1337)
    assert starts.tolist() == [947473, 215313, 85265, 334640, 518786]


def test_a_batch_is_a_function_of_its_index_alone(tmp_path):
    data = counting(tmp_path, 1000, 50)
    first = [data.batch("train", i) for i in range(100)]
    list(data.eval_batches("train", 3))
    other = Dataset(tmp_path, 8, 4, seed=1)  # a resumed run
    for i in [*range(99, -1, -7), 5, 5]:
        assert all(map(torch.equal, other.batch("train", i), first[i]))
    assert not torch.equal(Dataset(tmp_path, 8, 4, seed=2).batch("train", 0)[0], first[0][0])


def test_batches_do_not_depend_on_how_samples_are_grouped(tmp_path):
    counting(tmp_path, 1000, 50)
    rows = {B: torch.cat([Dataset(tmp_path, 8, B).batch("train", i)[0] for i in range(12 // B)]) for B in (1, 3, 12)}
    assert torch.equal(rows[1], rows[3]) and torch.equal(rows[1], rows[12])


def test_a_hundred_billion_tokens_cost_no_more_than_a_million():
    start = time.perf_counter()
    starts = starts_of(10**11, 1024, np.arange(64) + 10**9)
    assert time.perf_counter() - start < 0.5  # tens of milliseconds at most; an array of 10⁸ blocks takes longer
    assert len(set(starts)) == 64 and min(starts) >= 0 and 10**10 < max(starts) < 10**11 - 1024


def test_threads_may_share_a_data_set(tmp_path):
    data = counting(tmp_path, 2000, 50, B=16)
    alone = [data.batch("train", i)[0] for i in range(50)]
    wrong = []

    def read():
        for _ in range(5):
            wrong.extend(i for i in range(50) if not torch.equal(data.batch("train", i)[0], alone[i]))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- evaluation ---


@given(n=st.integers(2, 300), T=st.integers(1, 20), B=st.integers(1, 5), world_size=st.integers(1, 4))
def test_the_whole_of_val_counts_each_target_once_on_any_number_of_ranks(tmp_path_factory, n, T, B, world_size):
    n = max(n, T + 1)
    data = counting(tmp_path_factory.mktemp("data"), T + 1, n, B, T)
    targets = []
    for rank in range(world_size):
        for x, y in data.eval_batches("val", 0, rank, world_size):
            assert x.shape == y.shape == (B, T)
            assert torch.equal(y[y >= 0], x[y >= 0] + 1) and (x[y < 0] == 0).all() and (y >= -1).all()
            targets += y[y >= 0].tolist()
    assert sorted(targets) == list(range(1, n))


def test_ranks_deal_out_the_batches_of_one_rank_in_turn(tmp_path):
    data = counting(tmp_path, 1000, 500)
    alone = list(data.eval_batches("val", 9))
    for rank in range(3):
        share = list(data.eval_batches("val", 9, rank, 3))
        assert len(share) == 3
        for i, (x, y) in enumerate(share):
            assert torch.equal(x, alone[rank + 3 * i][0]) and torch.equal(y, alone[rank + 3 * i][1])


def test_a_part_of_the_blocks_is_spread_evenly_and_the_same_for_every_seed(tmp_path):
    data = counting(tmp_path, 8001, 50, B=5)
    starts = torch.cat([x[:, 0] for x, _ in data.eval_batches("train", 4)])
    assert torch.equal(starts, torch.arange(20) * 400)  # 20 of 1000 blocks of 8
    again = torch.cat([x[:, 0] for x, _ in Dataset(tmp_path, 8, 5, seed=99).eval_batches("train", 4)])
    assert torch.equal(starts, again)


def test_zero_eval_iters_reads_as_much_of_train_as_there_is_of_val(tmp_path):
    data = counting(tmp_path, 8001, 100)
    for split in ("train", "val"):
        assert sum(int((y >= 0).any(1).sum()) for _, y in data.eval_batches(split, 0)) == 13
    assert max(int(x.max()) for x, _ in data.eval_batches("train", 0)) > 7000


def test_more_eval_iters_than_blocks_reads_each_block_once(tmp_path):
    data = counting(tmp_path, 100, 100)
    assert sum(int((y >= 0).sum()) for _, y in data.eval_batches("val", 1000)) == 99


# --- what is refused ---


def test_a_missing_data_set_names_the_command_or_the_sets_there_are(tmp_path):
    for name in ("mine", "yours"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "prepare.py").touch()
    (tmp_path / "yours" / "train.bin").touch()
    with pytest.raises(UserError, match="run python .*prepare.py"):
        Dataset(tmp_path / "mine", 8, 4)
    with pytest.raises(UserError, match="nowhere.*data sets in .*: mine, yours"):
        Dataset(tmp_path / "nowhere", 8, 4)
    with pytest.raises(UserError, match="none"):
        Dataset(tmp_path / "no" / "where", 8, 4)


def test_a_split_shorter_than_a_block_and_its_target_names_both_numbers(tmp_path):
    counting(tmp_path, 100, 9)
    with pytest.raises(UserError, match=r"val.bin has 9 tokens, --block_size=9 needs 10"):
        Dataset(tmp_path, 9, 4)


def test_a_file_cut_inside_a_token_is_refused(tmp_path):
    counting(tmp_path, 100, 50)
    with open(tmp_path / "train.bin", "ab") as file:
        file.write(b"\0")
    with pytest.raises(UserError, match="train.bin.*uint16"):
        Dataset(tmp_path, 8, 4)


def test_a_file_cut_between_tokens_is_refused(tmp_path):
    counting(tmp_path, 100, 50)
    os.truncate(tmp_path / "train.bin", 180)
    with pytest.raises(UserError, match="train.bin has 90 tokens, meta.json says 100"):
        Dataset(tmp_path, 8, 4)


def changed_meta(**changes):
    return json.dumps({"dtype": "uint16", "vocab_size": 256, "tokenizer": {"type": "byte"},
                       "tokens": {"train": 100, "val": 100}} | changes)  # fmt: skip


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "{}", "\xff", "[" * 100_000, changed_meta(dtype="float32"), changed_meta(dtype=None),
     changed_meta(vocab_size=255), changed_meta(tokenizer={"type": "bytes"}), changed_meta(tokens={"train": 100}),
     changed_meta(tokens=None), changed_meta(tokens=[100, 100])],
    ids=range(14),
)  # fmt: skip
def test_a_broken_meta_json_is_refused_by_name(tmp_path, content):
    write_dataset(tmp_path, {"train": [range(100)], "val": [range(100)]}, ByteTokenizer(), "here")
    (tmp_path / "meta.json").write_text(changed_meta())
    Dataset(tmp_path, 8, 4)
    (tmp_path / "meta.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match="meta.json is broken"):
        Dataset(tmp_path, 8, 4)


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_id_outside_the_vocabulary_is_found_before_training_with_its_place(tmp_path, split):
    write_dataset(tmp_path, {"train": [range(100)], "val": [range(100)]}, ByteTokenizer(), "here")
    with open(tmp_path / f"{split}.bin", "r+b") as file:
        file.seek(2 * 77)
        file.write(b"\x00\x01\xff\xff")
    with pytest.raises(UserError, match=rf"{split}.bin: id 256 at position 77 is outside the vocabulary of 256"):
        Dataset(tmp_path, 8, 4)


def test_in_a_file_too_large_to_scan_the_id_is_found_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "FULL_CHECK_BYTES", 0)
    data = counting(tmp_path, 1000, 100)
    with open(tmp_path / "train.bin", "r+b") as file:
        file.seek(2 * 500)
        file.write(b"\xff\xff")
    with pytest.raises(UserError, match="id 65535 at position 500 "):
        for i in range(1000):
            data.batch("train", i)
    with pytest.raises(UserError, match="id 65535 at position 500 "):
        list(data.eval_batches("train", 1000))


def test_a_file_that_shrinks_during_training_is_an_error_and_no_repetition(tmp_path):
    data = counting(tmp_path, 1000, 100)
    os.truncate(tmp_path / "train.bin", 1000)
    with pytest.raises(UserError, match="train.bin became shorter"):
        for i in range(100):
            data.batch("train", i)


# --- nanoGPT's folders ---


def nanogpt_folder(folder: Path, ids):
    for split in ("train", "val"):
        np.array(ids, dtype="<u2").tofile(folder / f"{split}.bin")


def test_a_folder_of_nanogpt_with_characters_is_read(tmp_path):
    nanogpt_folder(tmp_path, [2, 0, 1, 1] * 5)
    meta = {"vocab_size": 3, "itos": {0: "b", 1: "z", 2: "a"}, "stoi": {"b": 0, "z": 1, "a": 2}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    data = Dataset(tmp_path, block_size=18, batch_size=1)
    assert data.vocab_size == 3
    assert data.tokenizer.decode(data.batch("train", 0)[0][0]) in "abzz" * 5


def test_a_folder_of_nanogpt_without_meta_holds_gpt2_tokens(tmp_path):
    nanogpt_folder(tmp_path, [50_256] * 20)
    data = Dataset(tmp_path, 8, 4)
    assert data.vocab_size == 50_257 and isinstance(data.tokenizer, GPT2Tokenizer)
    nanogpt_folder(tmp_path, [50_257] * 20)
    with pytest.raises(UserError, match="id 50257 at position 0 "):
        Dataset(tmp_path, 8, 4)
