"""prepare.py against nanoGPT's way, on the same cores and corpus: not a test, run it on a quiet machine.

    python tests/prepare_speed.py 60 5        # MB of corpus, pairs

nanoGPT's way is its data/openwebtext/prepare.py: datasets.map with encode_ordinary, then shards concatenated into a
memmap. Both clocks start after the imports; nanoGPT's also after the corpus is loaded. The corpus is the Python code
that this environment consists of. Each pair gives a ratio; the first is a warm-up.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKERS = os.cpu_count() or 1


def corpus(megabytes, path):
    """One JSON line a file → characters."""
    size = 0
    with open(path, "w", encoding="utf-8") as lines:
        for source in sorted(Path(sys.prefix).rglob("*.py")):
            text = source.read_text(encoding="utf-8", errors="replace")
            if text and size < megabytes * 10**6:
                size += len(text)
                lines.write(json.dumps({"text": text}) + "\n")
    return size


def nanogpts_way(path, folder):
    """→ seconds, tokens"""
    import datasets
    import numpy as np

    from tokenizer import GPT2Tokenizer

    encoding = GPT2Tokenizer().encoding
    datasets.disable_progress_bars()
    documents = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder))
    split = documents.train_test_split(test_size=0.1, seed=2357, shuffle=True)
    start, total = time.perf_counter(), 0

    def process(example):
        ids = encoding.encode_ordinary(example["text"])
        ids.append(encoding.eot_token)
        return {"ids": ids, "len": len(ids)}

    for name, part in split.map(process, remove_columns=["text"], num_proc=WORKERS).items():
        length = np.sum(part["len"], dtype=np.uint64)
        ids = np.memmap(folder / f"{name}.bin", dtype=np.uint16, mode="w+", shape=(int(length),))
        at, shards = 0, 16  # nanoGPT's 1024 are for a corpus a thousand times as large
        for number in range(shards):
            shard = part.shard(num_shards=shards, index=number, contiguous=True).with_format("numpy")
            together = np.concatenate(shard["ids"][:])
            ids[at : at + len(together)] = together
            at += len(together)
        ids.flush()
        total += at
    return time.perf_counter() - start, total


def ours(path, folder):
    """→ seconds, tokens"""
    import prepare

    start = time.perf_counter()
    prepare.main([str(path), f"--dataset={folder / 'ours'}"])
    seconds = time.perf_counter() - start
    return seconds, sum(json.loads((folder / "ours" / "meta.json").read_text())["tokens"].values())


def timed(way, path, scratch):
    """`way` in a process of its own, so that each time is a first time → tokens per second."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        command = [sys.executable, __file__, way, str(path), folder]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, tokens = map(float, said.splitlines()[-1].split())
    return tokens / seconds


def main(megabytes="60", pairs="5"):
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "corpus.jsonl"
        print(f"{corpus(float(megabytes), path) / 1e6:.0f} M characters, {WORKERS} workers")
        ratios = []
        for number in range(int(pairs) + 1):
            old, new = (timed(way, path, scratch) / 1e6 for way in WAYS)
            ratios.append(new / old)
            print(
                f"{f'pair {number}' if number else 'warm-up'}: nanoGPT's way {old:.2f} M tokens/s, "
                f"prepare.py {new:.2f}, ratio {new / old:.2f} (load {os.getloadavg()[0]:.1f})",
                flush=True,
            )
    print(f"median ratio {statistics.median(ratios[1:]):.2f}")


WAYS = {"nanogpt": nanogpts_way, "ours": ours}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in WAYS:
        sys.path.insert(0, str(ROOT))
        print(*WAYS[sys.argv[1]](sys.argv[2], Path(sys.argv[3])))
    else:
        main(*sys.argv[1:])
