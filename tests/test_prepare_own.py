"""prepare.py: every text lands in one split once, in order, in bounded memory, and no interruption shows."""

import gzip
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import ROOT, flags, here

import dataset
import prepare
import sample
import train
from configurator import UserError
from dataset import JOURNAL, SPLITS, Dataset, write_documents
from tokenizer import ByteTokenizer, CharTokenizer, GPT2Tokenizer

gpt2 = GPT2Tokenizer()
WORDS = "to be or not don't café 中文 12345 x = f(y);\n\n    return <|endoftext|> \t , . ".split(" ")


def some_texts(n, seed=1, longest=60):
    rng = random.Random(seed)
    return [f"{i} " + " ".join(rng.choices(WORDS, k=rng.randrange(longest))) for i in range(n)]


def ids_in(folder, split, dtype="<u2"):
    return np.fromfile(Path(folder) / f"{split}.bin", dtype=dtype).tolist()


def texts_in(folder, split):
    ids = ids_in(folder, split)
    ends = [-1] + [i for i, token in enumerate(ids) if token == gpt2.end_of_text]
    assert ends[-1] == len(ids) - 1
    return [gpt2.decode(ids[a + 1 : b]) for a, b in itertools.pairwise(ends)]


def bins(folder):
    return {split: (Path(folder) / f"{split}.bin").read_bytes() for split in SPLITS}


def json_lines(texts, field="text"):
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)).encode()


def prepared(folder, *argv):
    """prepare.py --dataset=folder argv → CompletedProcess, which must have succeeded."""
    done = here(prepare.main, *map(str, argv), f"--dataset={folder}")
    assert done.returncode == 0, done.stderr
    return done


def refused(folder, *argv):
    """What prepare.py says of a mistake: one or two lines."""
    done = here(prepare.main, *map(str, argv), f"--dataset={folder}")
    assert done.returncode == 2 and 1 <= len(done.stderr.splitlines()) <= 2, done.stderr
    return done.stderr


@pytest.fixture
def stdin(monkeypatch):
    def is_now(content):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return is_now


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(prepare, "CHUNK", 100)
    monkeypatch.setattr(dataset, "BATCH", 300)


# --- inputs ---


def write_parquet(path, texts, field="text", rows=100):
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": range(len(texts)), field: texts})
    pyarrow.parquet.write_table(table, path, row_group_size=rows, compression="none")


def as_txt(folder, texts):
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")


def as_txt_gz(folder, texts):
    for i, text in enumerate(texts):
        (folder / f"{i:03}.TXT.gz").write_bytes(gzip.compress(text.encode()))


def as_jsonl(folder, texts):
    (folder / "a.jsonl").write_bytes(json_lines(texts[:7]) + b"\n" + json_lines(texts[7:]).rstrip())


def as_jsonl_gz(folder, texts):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(texts)))


def as_parquet(folder, texts):
    write_parquet(folder / "a.parquet", texts)


def as_a_tree_of_all(folder, texts):
    as_jsonl(folder, texts[:10])
    (folder / "b.txt").write_text(texts[10], encoding="utf-8")
    write_parquet(folder / "c" / "y.parquet", texts[11:250])
    (folder / "c" / "z.txt").write_text(texts[250], encoding="utf-8")
    for i in (9, 3, 7, 5, 1):  # not in the order of their names
        (folder / f"d{i}" / "e").mkdir(parents=True)
        as_jsonl_gz(folder / f"d{i}" / "e", texts[240 + 10 * i + 1 :][: 20 if i < 9 else None])


@pytest.mark.parametrize("kind", [as_txt, as_txt_gz, as_jsonl, as_jsonl_gz, as_parquet, as_a_tree_of_all])
def test_every_kind_of_input_gives_the_same_documents_in_order(kind, tmp_path, small_pieces):
    texts = some_texts(300)
    (tmp_path / "in").mkdir()
    kind(tmp_path / "in", texts)
    done = prepared(tmp_path / "out", tmp_path / "in", "--workers=3")
    found = {split: texts_in(tmp_path / "out", split) for split in SPLITS}
    assert all(found[split] == [text for text in texts if text in set(found[split])] for split in SPLITS)
    assert sorted(found["train"] + found["val"]) == sorted(texts)
    assert "documents: 300;" in done.stdout and f"--dataset={tmp_path / 'out'}" in done.stdout.splitlines()[-1]


def test_stdin_is_text_or_json_lines(tmp_path, stdin):
    texts = some_texts(100)
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts, "body"))
    (tmp_path / "a.txt").write_bytes("\n".join(texts).encode())
    for kind, option in (("jsonl", "--field=body"), ("txt", "--val_fraction=0.2")):
        for tokenizer in ("gpt2", "char"):
            prepared(tmp_path / "file", tmp_path / f"a.{kind}", option, f"--tokenizer={tokenizer}", "--overwrite=True")
            stdin((tmp_path / f"a.{kind}").read_bytes())
            prepared(tmp_path / "pipe", "-", f"--stdin={kind}", option, f"--tokenizer={tokenizer}", "--overwrite=True")
            assert bins(tmp_path / "file") == bins(tmp_path / "pipe")


def test_files_of_other_kinds_are_named_and_left_out_and_a_file_given_twice_counts_once(tmp_path):
    as_jsonl(tmp_path, some_texts(50))
    for name in ["picture.png", "b.parquet.gz", *"1234567"]:
        (tmp_path / name).write_text("no text")
    done = prepared(tmp_path / "out", tmp_path, tmp_path / "a.jsonl")
    assert "documents: 50;" in done.stdout
    left_out = done.stdout.splitlines()[0]
    assert str(tmp_path / "1") in left_out and "and 4 more" in left_out


# --- splits ---


def test_documents_stay_in_their_split_when_others_are_added(tmp_path):
    texts = some_texts(2000, longest=5)
    for name, part in (("few", texts[500:1000]), ("many", texts)):
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines(part))
        prepared(tmp_path / name, tmp_path / f"{name}.jsonl", "--val_fraction=0.2")
    few, many = (set(texts_in(tmp_path / name, "val")) for name in ("few", "many"))
    assert few == many & set(texts[500:1000])
    assert 320 < len(many) < 480  # 400 ± 4.5 standard deviations


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.013])
@pytest.mark.parametrize("name, tokenizer", [("gpt2", gpt2), ("char", CharTokenizer), ("bytes", ByteTokenizer())])
def test_a_single_text_is_cut_by_position_and_its_first_part_trains(tmp_path, name, tokenizer, fraction, small_pieces):
    text = "\n".join(some_texts(50))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    prepared(tmp_path / "out", tmp_path / "a.txt", f"--val_fraction={fraction}", f"--tokenizer={name}")
    tokenizer = tokenizer("".join(sorted(set(text)))) if name == "char" else tokenizer
    cut = int(len(text) * (1 - fraction))
    assert ids_in(tmp_path / "out", "train") == tokenizer.encode(text[:cut])
    assert ids_in(tmp_path / "out", "val") == tokenizer.encode(text[cut:])
    assert Dataset(tmp_path / "out", 8, 2).tokenizer.describe() == tokenizer.describe()


def test_a_split_without_text_is_refused_and_nothing_stays_behind(tmp_path):
    as_txt(tmp_path, ["one text", "and another"])
    assert "no text fell to val" in refused(tmp_path / "out", tmp_path, "--val_fraction=1e-9")
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "a.txt").write_text("x")
    assert "no text fell to train" in refused(tmp_path / "out", tmp_path / "a.txt")


# --- pieces ---


@given(st.text("ab's 1,\n\t\r\x1c\x85\u3000中é", max_size=200), st.integers(1, 50), st.integers(1, 12))
def test_a_text_cut_at_safe_places_has_the_ids_of_the_whole(text, chunk, batch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "BATCH", batch)
        chunks = [text[i : i + chunk] for i in range(0, len(text), chunk)]
        pieces, last = zip(*dataset._pieces(chunks), strict=True)
    assert "".join(pieces) == text and max(map(len, pieces)) <= 2 * batch
    assert last == (False,) * (len(pieces) - 1) + (True,)
    together = [pieces[0]]  # what is cut within a word, because it is longer than a piece, is put together again
    for piece in pieces[1:]:
        if piece[0] in " \n" and not together[-1][-1].isspace():
            together.append(piece)
        else:
            together[-1] += piece
    assert sum((gpt2.encode(piece) for piece in together), []) == gpt2.encode(text)


def test_neither_workers_nor_batches_change_a_byte(tmp_path, monkeypatch):
    texts = some_texts(400)
    documents = [("train" if i % 3 else "val", text) for i, text in enumerate(texts)]
    found = []
    for workers, batch in ((1, 2**20), (4, 50), (3, 5000)):
        monkeypatch.setattr(dataset, "BATCH", batch)
        write_documents(tmp_path, documents, gpt2, "made up", workers=workers)
        found.append(bins(tmp_path))
    assert found[0] == found[1] == found[2]
    assert texts_in(tmp_path, "val") == texts[::3]


def test_a_vocabulary_above_65536_is_written_as_uint32(tmp_path):
    chars = "".join(map(chr, range(0x10000, 0x10000 + 2**16 + 1)))
    (tmp_path / "a.txt").write_text(chars * 2, encoding="utf-8")
    prepared(tmp_path / "out", tmp_path / "a.txt", "--tokenizer=char", "--val_fraction=0.5")
    assert ids_in(tmp_path / "out", "val", "<u4") == list(range(len(chars)))
    assert Dataset(tmp_path / "out", 8, 2).vocab_size == 2**16 + 1


# --- what is odd ---


def test_bad_utf8_and_empty_documents_are_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9 \xff\r\nend" * 1)
    (tmp_path / "b.txt").write_bytes(b"")
    lines = [b'{"text": "caf\xe9"}', b'{"text": ""}', b'{"text": null}', rb'{"text": "\ud800 \ud83d\ude00"}', b"  "]
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    done = prepared(tmp_path / "out", tmp_path, "--val_fraction=0.5")
    found = sorted(texts_in(tmp_path / "out", "train") + texts_in(tmp_path / "out", "val"))
    assert found == sorted(["caf\ufffd \ufffd\nend", "caf\ufffd", "\ufffd \U0001f600"])
    assert "documents: 6; empty: 3; bad UTF-8 made U+FFFD: 4;" in done.stdout


@pytest.mark.parametrize(
    "line, complaint",
    [(b'{"text": "cut', "no JSON"), (b"[1]", "list"), (b'{"body": "x", "id": 1}', '"text".*--field.*body, id'),
     (b'{"text": 5}', '"text"'), (b"[" * 100_000, "no JSON"), (b"9" * 5000, "no JSON")],
    ids=range(6),
)  # fmt: skip
def test_a_broken_line_is_named_or_counted(tmp_path, line, complaint):
    texts = some_texts(40)
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts[:2]) + line + b"\n" + json_lines(texts[2:]))
    assert re.search(rf"a\.jsonl:3: .*{complaint}.*--skip_broken", refused(tmp_path / "out", tmp_path / "a.jsonl"))
    done = prepared(tmp_path / "out", tmp_path / "a.jsonl", "--skip_broken=True")
    assert "documents: 40; broken lines left out: 1" in done.stdout


def test_mistakes_end_in_a_line_that_names_them(tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be " * 100)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "page.html").write_text("<p>")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "a.parquet").write_text("no such thing")
    write_parquet(tmp_path / "b.parquet", ["a", "b"], "body")
    cut = gzip.compress(random.Random(1).randbytes(10_000))[:5000]
    (tmp_path / "cut.txt.gz").write_bytes(cut)
    (tmp_path / "not.jsonl.gz").write_text("{}")
    monkeypatch.setattr(prepare, "MAX_LINE", 1000)
    (tmp_path / "long.jsonl").write_bytes(json_lines(["short", "long" * 300]))
    for argv, complaint in [
        ([], "name files or folders"),
        (["nowhere"], "nowhere: no such file"),
        ([tmp_path / "page.html"], r"page\.html: not \.txt"),
        ([tmp_path / "empty.txt"], r"no text in .*empty\.txt"),
        ([tmp_path / "nothing"], "no text in .*nothing"),
        ([tmp_path / "a.parquet"], r"a\.parquet can't be read"),
        ([tmp_path / "b.parquet"], r'b\.parquet: no column "text" .*among id, body'),
        ([tmp_path / "b.parquet", "--field=id"], r'b\.parquet: the column "id" .* no text'),
        ([tmp_path / "cut.txt.gz"], r"cut\.txt\.gz can't be read"),
        ([tmp_path / "not.jsonl.gz"], r"not\.jsonl\.gz can't be read"),
        ([tmp_path / "long.jsonl"], r"long\.jsonl:2: .*1,000 bytes"),
        ([text, "--tokenizer=bert"], "gpt2|char|bytes"),
        ([text, "--val_fraction=0"], "--val_fraction=0.0"),
        ([text, "--val_fraction=1"], "--val_fraction=1.0"),
        ([text, "--workers=0"], "--workers=0"),
        ([text, "--dateset=x"], "did you mean 'dataset'"),
    ]:
        assert re.search(complaint, refused(tmp_path / "out", *argv)), argv
    assert not (tmp_path / "out" / "meta.json").exists()
    assert re.search(r"page\.html.* can't be written", refused(tmp_path / "page.html" / "out", text))
    monkeypatch.chdir(tmp_path)
    assert "train.py would read the folder nothing" in refused("nothing", text)


def test_a_data_set_that_exists_is_kept_unless_overwrite_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be " * 100)
    (tmp_path / "b.txt").write_text("that is the question " * 100)
    prepared(tmp_path / "out", tmp_path / "a.txt")
    before = bins(tmp_path / "out")
    assert "--overwrite=True" in refused(tmp_path / "out", tmp_path / "b.txt")
    assert "no text" in refused(tmp_path / "out", tmp_path / "b.txt", "--val_fraction=1e-20", "--overwrite=True")
    assert bins(tmp_path / "out") == before and Dataset(tmp_path / "out", 8, 2)
    prepared(tmp_path / "out", tmp_path / "b.txt", "--overwrite=True")
    assert "question" in gpt2.decode(ids_in(tmp_path / "out", "train"))


# --- interruptions ---


class Counting(GPT2Tokenizer):
    def __init__(self):
        self.encoded = []  # by its copies for threads too

    def encode_to_numpy(self, text):
        self.encoded.append(text)
        return super().encode_to_numpy(text)


def test_what_was_written_is_never_encoded_again(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "BATCH", 300)
    monkeypatch.setattr(dataset, "JOURNAL_SECONDS", 0)
    documents = [("train" if i % 3 else "val", text) for i, text in enumerate(some_texts(200))]
    write_documents(tmp_path / "whole", documents, gpt2, "made up")

    def interrupted():
        yield from documents[:150]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_documents(tmp_path / "out", interrupted(), gpt2, "made up", workers=2)
    tokenizer = Counting()
    write_documents(tmp_path / "out", documents, tokenizer, "made up", workers=2)
    texts = [text for _, text in documents]
    first = texts.index(tokenizer.encoded[0])
    assert 50 < first < 150 and sorted(tokenizer.encoded) == sorted(texts[first:])
    assert bins(tmp_path / "out") == bins(tmp_path / "whole")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"train.bin", "val.bin", "meta.json"}


def kill_after(seconds, argv):
    """Run prepare.py in a copy of this process; SIGKILL. → whether it had come to its end."""
    child = os.fork()
    if not child:
        try:
            done = here(prepare.main, *argv)
            os._exit(done.returncode)
        finally:
            os._exit(99)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="takes a copy of this process")
@pytest.mark.parametrize("tokenizer", ["gpt2", "char"])
def test_kills_at_random_moments_do_not_change_a_byte(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(dataset, "BATCH", 10_000)
    monkeypatch.setattr(dataset, "JOURNAL_SECONDS", 0)
    (tmp_path / "a.jsonl").write_bytes(json_lines(some_texts(4000)))
    options = [f"--tokenizer={tokenizer}", "--workers=2"]
    start = time.perf_counter()
    prepared(tmp_path / "whole", tmp_path / "a.jsonl", *options)
    whole = time.perf_counter() - start
    rng, kills, batches = random.Random(1), 0, [0]
    argv = [str(tmp_path / "a.jsonl"), f"--dataset={tmp_path / 'out'}", *options]
    while not kill_after(rng.uniform(0, 0.6) * whole + 0.02 * kills * whole, argv):
        kills += 1
        journal = tmp_path / "out" / JOURNAL
        batches.append(json.loads(journal.read_text())["mark"]["batches"] if journal.exists() else 0)
        if (tmp_path / "out" / "meta.json").exists() and not journal.exists():
            break  # killed after the last thing it had to do
    assert kills >= 2 and max(batches) > 0 and batches[:-1] == sorted(batches[:-1])
    assert bins(tmp_path / "out") == bins(tmp_path / "whole")
    assert (tmp_path / "out" / "meta.json").read_bytes() == (tmp_path / "whole" / "meta.json").read_bytes()


@pytest.mark.parametrize("renames", range(4))
def test_a_kill_while_the_files_get_their_names_is_made_good(tmp_path, monkeypatch, renames):
    documents = [("train" if i % 3 else "val", text) for i, text in enumerate(some_texts(20))]
    meta = write_documents(tmp_path / "whole", documents, gpt2, "made up")
    replace, done = os.replace, []

    def until_killed(old, new):
        if not str(new).endswith(JOURNAL):
            if len(done) == renames:
                raise KeyboardInterrupt
            done.append(new)
        replace(old, new)

    monkeypatch.setattr(os, "replace", until_killed)
    with pytest.raises(KeyboardInterrupt):
        write_documents(tmp_path / "out", documents, gpt2, "made up")
    monkeypatch.undo()
    tokenizer = Counting()
    assert write_documents(tmp_path / "out", documents, tokenizer, "made up") == meta
    assert tokenizer.encoded == [] and bins(tmp_path / "out") == bins(tmp_path / "whole")


@pytest.mark.parametrize("change", ["text", "shorter", "split", "tokenizer", "end", "journal", "part"])
def test_an_interrupted_run_over_something_else_is_not_continued(tmp_path, monkeypatch, change):
    monkeypatch.setattr(dataset, "BATCH", 300)
    monkeypatch.setattr(dataset, "JOURNAL_SECONDS", 0)
    documents = [("train" if i % 3 else "val", text) for i, text in enumerate(some_texts(100))]

    def interrupted():
        yield from documents[:90]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_documents(tmp_path, interrupted(), gpt2, "made up")
    other, options = list(documents), {}
    match change:
        case "text":
            other[3] = ("val", documents[3][1].replace("3", "4"))
        case "shorter":
            other = other[:10]
        case "split":
            other[3] = ("train", documents[3][1])
        case "end":
            options = {"end_of_text": False}
        case "journal":
            (tmp_path / JOURNAL).write_text("{")
        case "part":
            os.truncate(tmp_path / "train.bin.part", 100)
    tokenizer = ByteTokenizer() if change == "tokenizer" else gpt2
    with pytest.raises(UserError, match=f"{JOURNAL}.*remove it"):
        write_documents(tmp_path, other, tokenizer, "made up", **options)
    (tmp_path / JOURNAL).unlink()
    write_documents(tmp_path, other, tokenizer, "made up", **options)
    assert Dataset(tmp_path, 8, 2)


# --- memory ---


def test_documents_are_read_no_faster_than_they_are_encoded(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "BATCH", 1000)
    read, ahead = [], []

    class Slow(ByteTokenizer):
        def encode_to_numpy(self, text):
            time.sleep(0.002)
            ahead.append(len(read) - len(ahead))
            return super().encode_to_numpy(text)

    def documents():
        for i in range(200):
            read.append(i)
            yield "train" if i else "val", "x" * 950

    write_documents(tmp_path, documents(), Slow(), "made up", workers=2)
    assert len(read) == 200 and max(ahead) < 10


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """90 MB in a .txt, a .jsonl.gz and a .parquet take no more than 18 MB do, but for 10 MB of slack."""
    texts = some_texts(900, longest=900)
    for times in (4, 20):
        folder = tmp_path / str(times)
        folder.mkdir()
        (folder / "a.txt").write_text("\n".join(texts) * times, encoding="utf-8")
        (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(texts), 1) * times)
        write_parquet(folder / "c.parquet", [f"{i} {text}" for i in range(times) for text in texts], rows=10**6)
    code = f"""
import pathlib, re, resource
import dataset, prepare
dataset.BATCH = 2**16  # what waits for a worker, more of it on a busy machine, is to be small beside what is measured
status = pathlib.Path("/proc/self/status")  # Linux; its ru_maxrss starts with the parent's
for folder in ("{tmp_path}/4", "{tmp_path}/4", "{tmp_path}/20"):  # the first warms up
    options = "--tokenizer=bytes --val_fraction=0.5 --workers=2 --overwrite=1".split()
    prepare.main([folder, "--dataset=" + folder + "/out", *options])
    peak = re.search(r"VmHWM:\\s*(\\d+)", status.read_text())[1] if status.exists() else resource.getrusage(0).ru_maxrss
    print(int(peak) // 2**10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    _, small, large = (int(line) for line in done.stdout.splitlines() if line.isdigit())
    assert sum(map(len, bins(tmp_path / "20" / "out").values())) > 2 * 80 * 10**6
    assert large < small + 10 and large < 1000, (small, large)


# --- and then ---


@pytest.mark.parametrize("tokenizer", ["gpt2", "char", "bytes"])
def test_training_and_sampling_need_nothing_else(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 50)
    done = prepared(tmp_path / "mine", tmp_path / "a.txt", f"--tokenizer={tokenizer}")
    data = re.search("--dataset=(.+)", done.stdout)[1]
    out = tmp_path / "out"
    done = here(train.main, *flags(data, out, "--max_iters=2", "--eval_iters=1", "--eval_interval=2"))
    assert done.returncode == 0, done.stderr
    done = here(
        sample.main, f"--out_dir={out}", "--device=cpu", "--num_samples=1", "--max_new_tokens=5", "--start=to be"
    )
    assert done.returncode == 0 and "to be" in done.stdout, done.stderr
