"""Text of your own → a data set, in GPT-2 tokens, characters or bytes.

    python prepare.py novel.txt --dataset=mine --tokenizer=char
    python prepare.py archive/ more.jsonl.gz --dataset=mine --field=body
    zcat dump.jsonl.gz | python prepare.py - --stdin=jsonl --dataset=mine
    python train.py --dataset=mine

Reads .txt, .jsonl (both also .gz), .parquet, folders of these in sorted order, and `-`, stdin. A document is a
.txt file, a .jsonl line or a .parquet row. Whether it is for validation says a hash of its text: so it stays where
it is when others are added. A single text is cut by position instead, and its first part trains.

The same command after an interruption goes on where it was.
"""

import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Literal

from configurator import UserError, command, help_text, parse
from dataset import JOURNAL, write_documents
from tokenizer import ByteTokenizer, CharTokenizer, GPT2Tokenizer

CHUNK = 2**20  # characters of a .txt file that are read at a time
MAX_LINE = 2**25  # bytes of one .jsonl line, so that memory has a bound
IN_MEMORY = 2**26  # bytes of stdin, if it must be read twice; beyond, it goes to the temporary folder
COUNTED = "replaced-and-counted"  # what to do with bad UTF-8; see Reader


@dataclass
class PrepareConfig:
    dataset: str = "mine"  # the folder data/NAME to write, or a path; train.py takes the same
    tokenizer: Literal["gpt2", "char", "bytes"] = "gpt2"  # byte pairs; an id a character that occurs; an id a byte
    # A tenth of a small text is just enough to measure a loss on.
    val_fraction: float = 0.1  # of the documents, or of a single text, for validation; for gigabytes 0.001 will do
    field: str = "text"  # where a .jsonl line or .parquet row has its text
    stdin: Literal["txt", "jsonl"] = "txt"  # what - is
    skip_broken: bool = False  # leave out, and count, .jsonl lines without a text; else the first one stops
    overwrite: bool = False  # replace a data set that is there already
    workers: int = os.cpu_count() or 1  # threads that encode

    def check(self):
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"--val_fraction={self.val_fraction}: above 0 and below 1")
        if self.workers < 1:
            raise ValueError(f"--workers={self.workers}: at least 1")
        if not self.dataset:
            raise ValueError("--dataset= must name the folder to write")


# --- what to read ---


def kind_of(path: str) -> str | None:
    name = path.lower()
    kind = os.path.splitext(name.removesuffix(".gz"))[1].removeprefix(".")
    return kind if kind in ("txt", "jsonl") or (kind == "parquet" and not name.endswith(".gz")) else None


def find_files(inputs: list[str]) -> tuple[list[str], list[str]]:
    """(files with text, others that the folders hold), each once. UserError for an input that is neither."""
    files, others = [], []
    for given in inputs:
        if os.path.isdir(given):
            for folder, subfolders, names in os.walk(given):
                subfolders.sort()
                for name in sorted(names):
                    (files if kind_of(name) else others).append(os.path.normpath(os.path.join(folder, name)))
        elif given != "-" and not os.path.exists(given):
            raise UserError(f"{given}: no such file or folder")
        elif given != "-" and not kind_of(given):
            raise UserError(f"{given}: not .txt, .jsonl, .txt.gz, .jsonl.gz or .parquet; `- < {given}` reads any text")
        else:
            files.append(os.path.normpath(given))
    return list(dict.fromkeys(files)), others


class Reader:
    """The texts in some files, and a count of what was odd about them."""

    def __init__(self, cfg: PrepareConfig, files: list[str], stdin):
        self.cfg, self.files, self.stdin = cfg, files, stdin
        self.documents = self.empty = self.broken = self.bad_utf8 = 0

        def count(error):
            self.bad_utf8 += 1
            return "\ufffd", error.end

        codecs.register_error(COUNTED, count)

    def chunks(self) -> Iterator[tuple[int, str]]:
        """Yield (number of the document, some of its text) in order; nothing of empty ones."""
        from tqdm import tqdm

        size = sum(os.path.getsize(path) for path in self.files if path != "-")
        # None: a bar on a terminal only
        with tqdm(total=size or None, unit="B", unit_scale=True, disable=None) as progress:
            for path in self.files:
                try:
                    with contextlib.nullcontext(self.stdin) if path == "-" else open(path, "rb") as file:
                        before = 0
                        for text in self._texts(path, file):
                            if text:
                                yield self.documents, text
                            else:
                                self.empty += 1
                            if path != "-":
                                progress.update(file.tell() - before)
                                before = file.tell()
                        if path != "-":
                            progress.update(os.path.getsize(path) - before)
                except (OSError, EOFError, ValueError, zlib.error) as error:
                    raise UserError(f"{path} can't be read: {error}") from None

    def counts(self) -> str:
        odd = {"empty": self.empty, "broken lines left out": self.broken, "bad UTF-8 made U+FFFD": self.bad_utf8}
        return "; ".join([f"documents: {self.documents:,}", *(f"{what}: {n:,}" for what, n in odd.items() if n)])

    def _texts(self, path, file):
        kind = self.cfg.stdin if path == "-" else kind_of(path)
        if path.lower().endswith(".gz"):
            file = gzip.GzipFile(fileobj=file)
        return {"txt": self._txt, "jsonl": self._jsonl, "parquet": self._parquet}[kind](path, file)

    def _txt(self, path, file):
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors=COUNTED)
        self.documents += 1
        yield text.read(CHUNK)
        while chunk := text.read(CHUNK):
            yield chunk
        text.detach()  # or it would close stdin

    def _jsonl(self, path, file):
        name = self.cfg.field
        for number in itertools.count(1):
            line = file.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE:
                raise UserError(f"{path}:{number}: the line has more than {MAX_LINE:,} bytes")
            line = line.decode("utf-8-sig" if number == 1 else "utf-8", COUNTED)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                odd = "" if isinstance(row, dict) else f"{type(row).__name__} instead of an object"
            except (ValueError, RecursionError) as error:
                odd = f"no JSON ({error})"
            if not odd and not isinstance(row.get(name, 0), str | None):
                odd = f'no text in "{name}" (--field=NAME), among {", ".join(row)}'[:300]
            if odd and not self.cfg.skip_broken:
                remedy = "mend it, or leave out and count such lines with --skip_broken=True"
                raise UserError(f"{path}:{number}: {odd}; {remedy}")
            if odd:
                self.broken += 1
                continue
            self.documents += 1
            yield self._without_surrogates(row[name] or "")

    def _parquet(self, path, file):
        import pyarrow.parquet

        # By default it reads a whole column of a row group at once.
        table = pyarrow.parquet.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
        if self.cfg.field not in table.schema_arrow.names:
            found = ", ".join(table.schema_arrow.names)
            raise UserError(f'{path}: no column "{self.cfg.field}" (--field=NAME), among {found}')
        for batch in table.iter_batches(batch_size=64, columns=[self.cfg.field], use_threads=False):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str | None):
                    raise UserError(f'{path}: the column "{self.cfg.field}" (--field=NAME) holds no text: {text!r:.50}')
                self.documents += 1
                yield text or ""

    def _without_surrogates(self, text):
        """JSON can write half of a character ("\\ud800"), which no encoding can."""
        try:
            text.encode()
            return text
        except UnicodeEncodeError:
            return text.encode("utf-16", "surrogatepass").decode("utf-16", COUNTED)


# --- which text is for validation ---


def by_position(chunks, cut: int) -> Iterator[tuple[str, Iterator[str]]]:
    """A single text: the first `cut` characters train."""

    def parts():
        before = 0
        for _, text in chunks:
            train = max(0, cut - before)
            before += len(text)
            yield from ((split, part) for split, part in (("train", text[:train]), ("val", text[train:])) if part)

    for split, group in itertools.groupby(parts(), itemgetter(0)):
        yield split, map(itemgetter(1), group)


def by_hash(chunks, val_fraction: float) -> Iterator[tuple[str, Iterator[str]]]:
    """Documents: a hash of each one's first million characters, whatever else there is, says where it belongs."""
    for _, group in itertools.groupby(chunks, itemgetter(0)):
        texts = map(itemgetter(1), group)
        first = next(texts)
        digest = hashlib.blake2b(first[:CHUNK].encode(), digest_size=8).digest()
        is_val = int.from_bytes(digest, "big") < val_fraction * 2**64
        yield "val" if is_val else "train", itertools.chain([first], texts)


# --- the command ---


def data_folder(cfg: PrepareConfig) -> Path:
    """Where train.py --dataset will look. UserError if a data set is there that would be lost."""
    name = cfg.dataset
    folder = Path(__file__).resolve().parent / "data" / name
    if Path(name).is_absolute() or os.path.basename(name) != name:
        folder = Path(name)
    elif os.path.isdir(name) and Path(name).resolve() != folder:
        raise UserError(f"--dataset={name}: train.py would read the folder {name} that is here; take another name")
    there = [path for path in ("train.bin", "val.bin", "meta.json") if (folder / path).exists()]
    if there and not cfg.overwrite and not (folder / JOURNAL).exists():
        raise UserError(f"{folder} has a {there[0]}: --overwrite=True replaces it, another --dataset=NAME keeps it")
    return folder


@command
def main(argv):
    if "--help" in argv or "-h" in argv:
        options = help_text(PrepareConfig).partition("\n")[2]
        print(f"usage: python prepare.py FILE_OR_FOLDER ... [--option=value ...]   (- is stdin)\n{options}")
        return
    inputs = [arg for arg in argv if arg == "-" or not arg.startswith("-")]
    cfg = parse(PrepareConfig, [arg for arg in argv if arg not in inputs])
    if not inputs:
        raise UserError("name files or folders with text, or - for stdin; --help lists the options")
    folder = data_folder(cfg)
    files, others = find_files(inputs)
    if others:
        print(f"left out, no text by their names: {_some(others)}")

    stdin = sys.stdin.buffer
    single = len(files) == 1 and (cfg.stdin if files == ["-"] else kind_of(files[0])) == "txt"
    length, characters = 0, set()
    if single or cfg.tokenizer == "char":  # a pass before, for where to cut, or for the vocabulary
        if "-" in files:
            stdin = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115
            shutil.copyfileobj(sys.stdin.buffer, stdin)
            stdin.seek(0)
        for _, text in Reader(cfg, files, stdin).chunks():
            length += len(text)
            if cfg.tokenizer == "char":
                characters.update(text)
        if "-" in files:
            stdin.seek(0)

    reader = Reader(cfg, files, stdin)
    chunks = reader.chunks()
    first = next(chunks, None)
    if not first:
        raise UserError(f"no text in {_some(inputs)}: {reader.counts()}")
    chunks = itertools.chain([first], chunks)
    documents = (
        by_position(chunks, int(length * (1 - cfg.val_fraction))) if single else by_hash(chunks, cfg.val_fraction)
    )
    match cfg.tokenizer:
        case "gpt2":
            tokenizer = GPT2Tokenizer()
        case "char":
            tokenizer = CharTokenizer("".join(sorted(characters)))
        case "bytes":
            tokenizer = ByteTokenizer()
    try:
        meta = write_documents(folder, documents, tokenizer, _some(inputs), end_of_text=not single, workers=cfg.workers)
    except OSError as error:
        raise UserError(f"{folder} can't be written: {error}") from error
    print(f"{reader.counts()}; vocabulary {meta['vocab_size']:,}")
    print(f"tokens: train {meta['tokens']['train']:,}, val {meta['tokens']['val']:,}, in {folder}")
    print(f"next: python train.py --dataset={cfg.dataset}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


if __name__ == "__main__":
    main()
