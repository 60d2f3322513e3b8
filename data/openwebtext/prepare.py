"""OpenWebText in GPT-2 tokens: 8,013,769 documents, 9 billion tokens; 17 GB here, 54 GB in datasets' cache.

    python data/openwebtext/prepare.py                       # downloads it from the Hugging Face hub
    python data/openwebtext/prepare.py --path=my_documents   # a local folder instead, with a column "text"

Memory stays flat whatever their number. A run that was interrupted goes on when it is called again.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the repository, from wherever we are called

from configurator import UserError, command, parse  # noqa: E402
from dataset import write_documents  # noqa: E402
from tokenizer import GPT2Tokenizer  # noqa: E402

HUB_NAME = "Skylion007/openwebtext"
AT_ONCE = 1000  # documents


@dataclass
class PrepareConfig:
    path: str = ""  # a local data set (parquet, JSON lines, or what save_to_disk wrote); "" downloads
    out_dir: str = str(HERE)  # where train.bin, val.bin and meta.json go
    num_proc: int = os.cpu_count() or 1  # threads that encode, processes that download

    def check(self):
        if self.num_proc < 1:
            raise ValueError(f"--num_proc={self.num_proc}: at least 1")


def load_documents(cfg: PrepareConfig):
    """The `datasets.Dataset`, memory-mapped from disk. UserError if it can't be had or has no texts."""
    import datasets

    name = cfg.path or HUB_NAME
    try:
        if cfg.path and (Path(cfg.path) / "state.json").exists():
            documents = datasets.load_from_disk(cfg.path)
        else:
            documents = datasets.load_dataset(name, split="train", num_proc=cfg.num_proc)
    except Exception as error:  # the library raises whatever its storage, parser and network do
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"can't load {name}: {reason}\n--path=FOLDER reads a local copy") from error
    if "text" not in documents.column_names or len(documents) < 2:
        found = f"{len(documents)} documents with {documents.column_names}"
        raise UserError(f'{name}: {found}, expected at least two with a column "text"')
    return documents


def held_out(n: int) -> list[int]:
    """Which of n documents are for validation: 1 in 2,000, the very ones (and order) that nanoGPT holds out.

    So losses compare with published ones. Only numbers are shuffled: the documents are read in their order on
    disk, several times faster than at random, and training permutes the blocks anyway.
    """
    import datasets

    numbers = datasets.Dataset.from_dict({"number": range(n)})
    return numbers.train_test_split(test_size=0.0005, seed=2357, shuffle=True)["test"]["number"][:]


def split_documents(documents):
    """Yield (split, text) of each document, val first."""
    from tqdm import tqdm

    val = held_out(len(documents))
    held = set(val)
    with tqdm(total=len(documents), unit="doc", disable=None) as progress:  # None: on a terminal only
        for split, part in (("val", documents.select(val)), ("train", documents)):
            for start in range(0, len(part), AT_ONCE):
                for number, text in enumerate(part[start : start + AT_ONCE]["text"], start):
                    if split == "val" or number not in held:
                        yield split, text
                        progress.update()


@command
def main(argv):
    cfg = parse(PrepareConfig, argv)
    documents = split_documents(load_documents(cfg))
    source = cfg.path or f"huggingface.co/datasets/{HUB_NAME}"
    meta = write_documents(cfg.out_dir, documents, GPT2Tokenizer(), source, workers=cfg.num_proc)
    print(f"tokens: train {meta['tokens']['train']:,}, val {meta['tokens']['val']:,}")
    print("next: torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py")


if __name__ == "__main__":
    main()
