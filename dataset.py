"""Token files, both ways; a batch is a function of its index.

    write_documents("data/mine", [("train", "one text"), ("val", "another")], GPT2Tokenizer(), source="my diary")
    x, y = Dataset("data/mine", block_size=256, batch_size=64, seed=1337).batch("train", 0)

A data set is a folder with train.bin and val.bin (the ids alone, little-endian uint16, or uint32 for a
vocabulary above 65,536) and meta.json. nanoGPT's folders are read too: no meta.json, maybe a meta.pkl.

B batch, T time (block_size), n tokens of a split.
"""

import hashlib
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from configurator import UserError
from fetch import write_whole
from tokenizer import GPT2Tokenizer, Tokenizer, from_description, read_meta_pkl

SPLITS = ("train", "val")
IGNORED = -1  # a target that does not count
FULL_CHECK_BYTES = 256 * 2**20  # up to this size a file is checked for bad ids at the start: about 0.1 s
FEISTEL_ROUNDS = 6

BATCH = 2**20  # characters that a worker encodes at a time: 0.1 s for tiktoken, a few MB of memory
# Neither GPT-2's pattern nor a character or byte goes on from a non-space to a space: a text may be cut there.
SAFE_CUT = re.compile(r"(?<=\S)[ \n]")
JOURNAL = "journal.json.part"  # in the folder of a data set that is being written
JOURNAL_SECONDS = 2.0  # how much work a kill may cost


def write_dataset(
    folder: str | Path,
    splits: dict[str, Iterable],  # split → 1-D arrays or lists of ids, in order; read one at a time
    tokenizer: Tokenizer,
    source: str,  # where the text came from, for people
    sha256: str | None = None,  # of the text, if known
) -> dict:
    """Write a data set and return its meta.json. ValueError for an id that the tokenizer doesn't have.

    An interruption leaves the old data set, or a meta.json that the reader refuses; no half that looks whole.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = _dtype_for(tokenizer)
    parts = {split: folder / f"{split}.bin.tmp" for split in splits}
    try:
        for split, arrays in splits.items():
            with open(parts[split], "wb") as file:
                for array in arrays:
                    ids = np.asarray(array, dtype=np.int64)
                    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
                        raise ValueError(f"{split}: an id outside 0 … {tokenizer.vocab_size - 1}")
                    file.write(ids.astype(dtype).tobytes())
        return _publish(folder, parts, tokenizer, source, sha256)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def write_documents(
    folder: str | Path,
    documents: Iterable[tuple[str, str | Iterable[str]]],  # (split, text, whole or in chunks), in order
    tokenizer: Tokenizer,
    source: str,  # where the text came from, for people
    sha256: str | None = None,  # of the text, if known
    end_of_text: bool = True,  # after each document, if the tokenizer has such an id
    workers: int = os.cpu_count() or 1,
) -> dict:
    """Encode documents into a data set and return its meta.json: with `workers` threads, in flat memory.

    Threads are as fast as processes here, as tiktoken works outside the interpreter's lock, and texts and ids
    change hands without a copy. What was done is journaled: the same call after an interruption reads the
    documents up to there, checks by a hash that they are the same, and goes on, to the same bytes.

    UserError for a journal of other documents, and for a split without a token; OSError from the disk.
    """
    tokenizer.encode("")  # tokenizer files that are missing are missed now
    dtype = _dtype_for(tokenizer)
    has_end = end_of_text and tokenizer.end_of_text is not None
    end = np.array([tokenizer.end_of_text] if has_end else [], dtype)

    own = threading.local()

    def start():
        own.tokenizer = tokenizer.for_thread()

    def encode(batch):
        ids = {split: [end[:0]] for split in SPLITS}
        for split, text, ends in batch:
            ids[split].append(own.tokenizer.encode_to_numpy(text).astype(dtype, copy=False))
            if ends:
                ids[split].append(end)
        return {split: np.concatenate(arrays).tobytes() for split, arrays in ids.items()}

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = _Unfinished(folder, tokenizer, has_end)
    waiting: deque = deque()  # (mark, future) in order; twice as many as workers, so that none is idle
    with ThreadPoolExecutor(workers, initializer=start) as pool:
        for mark, batch in unfinished.still_to_do(_batches(documents)):
            waiting.append((mark, pool.submit(encode, batch)))
            if len(waiting) > 2 * workers:
                mark, encoded = waiting.popleft()
                unfinished.append(mark, encoded.result())
        while waiting:
            mark, encoded = waiting.popleft()
            unfinished.append(mark, encoded.result())
    unfinished.save(complete=True)
    if empty := [split for split, path in unfinished.parts.items() if not path.stat().st_size]:
        unfinished.remove()
        raise UserError(f"no text fell to {' and '.join(empty)}: more documents are needed, or another --val_fraction")
    meta = _publish(folder, unfinished.parts, tokenizer, source, sha256)
    unfinished.remove()
    return meta


class _Unfinished:
    """The part files of a data set that is being written, and a journal of what in them is safe on disk."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, has_end: bool):
        self.journal = folder / JOURNAL
        self.parts = {split: folder / f"{split}.bin.part" for split in SPLITS}
        self._as = {"tokenizer": tokenizer.describe(), "end_of_text": has_end}
        self._mark = {"batches": 0, "hash": ""}
        self._saved = time.monotonic()
        sizes = dict.fromkeys(SPLITS, 0)
        if self.journal.exists():
            try:
                said = json.loads(self.journal.read_bytes())
                self._mark, sizes = said["mark"], said["sizes"]
                for split, part in self.parts.items():
                    if said["complete"] and not part.exists():  # killed between the renames of _publish
                        os.replace(folder / f"{split}.bin", part)
                if said["as"] != self._as or any(p.stat().st_size < sizes[s] for s, p in self.parts.items()):
                    raise ValueError
            except (ValueError, KeyError, TypeError, OSError):
                raise self._other() from None
        for split, part in self.parts.items():
            part.touch()
            os.truncate(part, sizes[split])

    def still_to_do(self, batches) -> Iterator[tuple[dict, list]]:
        """Yield (mark, batch) for each batch after those in the journal; UserError if those were other ones."""
        hashed, number, done = hashlib.blake2b(digest_size=16), 0, self._mark
        for number, batch in enumerate(batches, 1):
            for split, text, ends in batch:
                hashed.update(f"{split} {ends} {len(text)} {text}".encode("utf-8", "surrogatepass"))
            mark = {"batches": number, "hash": hashed.hexdigest()}
            if number > done["batches"]:
                yield mark, batch
            elif number == done["batches"] and mark != done:
                raise self._other()
        if number < done["batches"]:
            raise self._other()

    def append(self, mark: dict, encoded: dict[str, bytes]):
        for split, content in encoded.items():
            with open(self.parts[split], "ab") as file:
                file.write(content)
        self._mark = mark
        if time.monotonic() > self._saved + JOURNAL_SECONDS:
            self.save()

    def save(self, complete: bool = False):
        sizes = {}
        for split, part in self.parts.items():
            with open(part, "ab") as file:
                os.fsync(file.fileno())
                sizes[split] = file.tell()
        said = {"as": self._as, "mark": self._mark, "sizes": sizes, "complete": complete}
        write_whole(self.journal, json.dumps(said).encode())
        self._saved = time.monotonic()

    def remove(self):
        for path in (*self.parts.values(), self.journal):
            path.unlink(missing_ok=True)

    def _other(self):
        return UserError(f"{self.journal} is of an interrupted run over other text or options: remove it to start anew")


def _batches(documents) -> Iterator[list[tuple[str, str, bool]]]:
    """Documents → lists, of about BATCH characters, of (split, piece of text, does a document end here?)."""
    batch, size = [], 0
    for split, text in documents:
        for piece, ends in _pieces([text] if isinstance(text, str) else text):
            batch.append((split, piece, ends))
            size += len(piece) + 100  # what a short document takes besides its text
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(chunks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Cut a text anew: yield (piece, is it the last?), at most 2 · BATCH characters each.

    The pieces' ids are together those of the whole, unless BATCH characters pass without a SAFE_CUT (a million
    letters without a space, or spaces without a letter): then the cut is where it is, and a word becomes two.
    """
    text = ""
    for chunk in chunks:
        for at in range(0, len(chunk), BATCH):
            text += chunk[at : at + BATCH]
            if len(text) > 2 * BATCH:
                found = SAFE_CUT.search(text, BATCH, 2 * BATCH)
                cut = found.start() if found else 2 * BATCH
                yield text[:cut], False
                text = text[cut:]
    yield text, True


def _publish(folder: Path, parts: dict[str, Path], tokenizer: Tokenizer, source: str, sha256: str | None) -> dict:
    """Give whole part files their names; write and return meta.json."""
    dtype = _dtype_for(tokenizer)
    tokens = {split: part.stat().st_size // dtype.itemsize for split, part in parts.items()}
    # From here to the last line the folder is neither old nor new, and says so.
    write_whole(folder / "meta.json", b'{"state": "unfinished"}\n')
    for split, part in parts.items():
        os.replace(part, folder / f"{split}.bin")
    meta = {
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.describe(),
        "tokens": tokens,
        "source": source,
        "sha256": sha256,
    }
    write_whole(folder / "meta.json", (json.dumps(meta, indent=1) + "\n").encode())
    return meta


class Dataset:
    """Batches of a folder's two token files, on the CPU.

    The order of training is a function, not a state. The batches 0, 1, 2 … deal out samples 0, 1, 2 …, B at a
    time. An epoch cuts the split into n_blocks blocks of T tokens, from a start offset of its own, and deals
    each once, in an order of its own. Offset and order are hashes of (seed, epoch): nothing to store or to
    restore, the same on any machine, and as cheap for 10¹¹ tokens as for 10⁶.

    UserError, before any model is built, for files that are missing, broken, too short or hold unknown ids.
    """

    def __init__(self, folder: str | Path, block_size: int, batch_size: int, seed: int = 1337):
        self.folder = Path(folder)
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        for split in SPLITS:
            if not self._path(split).is_file():
                raise UserError(f"{self._path(split)} does not exist: {_remedy(self.folder)}")
        meta = _read_meta(self.folder)
        self.tokenizer: Tokenizer = meta["tokenizer"]
        self.vocab_size = self.tokenizer.vocab_size
        self.dtype = _numpy_dtype(meta["dtype"])
        self.tokens = {split: self._count(split, meta["tokens"]) for split in SPLITS}
        self._lock = threading.Lock()  # seek and read are two steps; a prefetching thread may share the file
        # Files and not memory maps: a map's pages count as this process's memory until the whole file does.
        self._files = {split: open(self._path(split), "rb", buffering=0) for split in SPLITS}  # noqa: SIM115
        for split in SPLITS:
            if self._path(split).stat().st_size <= FULL_CHECK_BYTES:
                step = 2**22
                for start in range(0, self.tokens[split], step):
                    self._read(split, start, np.empty(min(step, self.tokens[split] - start), self.dtype))

    def __str__(self):
        counts = ", ".join(f"{n:,} {split}" for split, n in self.tokens.items())
        return f"{self.folder.name}: {counts} tokens ({self.tokenizer.describe()['type']})"

    def batch(self, split: str, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch number `index` ≥ 0 → x, y: (B, T) int64; y is x one token on. UserError for an unknown id."""
        sample = np.arange(self.batch_size, dtype=np.uint64) + np.uint64(index * self.batch_size)
        starts = sample_starts(sample, self.tokens[split], self.block_size, self.seed)
        rows = np.empty((self.batch_size, self.block_size + 1), self.dtype)
        for row, start in zip(rows, starts.tolist(), strict=True):
            self._read(split, start, row)
        ids = torch.from_numpy(rows.astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def eval_batches(self, split: str, eval_iters: int, rank: int = 0, world_size: int = 1) -> Iterator:
        """Yield this rank's share, every world_size-th, of a fixed set of batches, x, y: (B, T) int64.

        The split is cut into ⌈(n - 1) / T⌉ blocks; eval_iters batches of them are taken, evenly spread, or as
        many as val has for eval_iters = 0: then each target of val counts exactly once. Every batch has the
        same shape (compiled models like that) and every rank as many (so that ranks can act together);
        places without a token hold x = 0, y = -1.
        """
        B, T = self.batch_size, self.block_size
        blocks = {name: -(-(n - 1) // T) for name, n in self.tokens.items()}
        total = blocks[split]
        taken = min(total, eval_iters * B if eval_iters else blocks["val"])
        for first in range(rank * B, taken + rank * B, world_size * B):
            x, y = torch.zeros(B, T, dtype=torch.int64), torch.full((B, T), IGNORED)
            for row, number in enumerate(range(first, min(first + B, taken))):
                start = number * total // taken * T
                ids = np.empty(min(T + 1, self.tokens[split] - start), self.dtype)
                self._read(split, start, ids)
                ids = torch.from_numpy(ids.astype(np.int64))
                x[row, : len(ids) - 1], y[row, : len(ids) - 1] = ids[:-1], ids[1:]
            yield x, y

    def _path(self, split):
        return self.folder / f"{split}.bin"

    def _count(self, split, said):
        """Tokens of a split, by the size of its file, which must be what meta.json said and hold a block."""
        path, remedy = self._path(split), _remedy(self.folder)
        n, rest = divmod(path.stat().st_size, self.dtype.itemsize)
        if rest:
            raise UserError(f"{path}: its size is no whole number of {self.dtype.name} ids; {remedy}")
        if said and said[split] != n:
            raise UserError(f"{path} has {n} tokens, meta.json says {said[split]}; {remedy}")
        if n < self.block_size + 1:
            needs = f"--block_size={self.block_size} needs {self.block_size + 1}"
            raise UserError(f"{path} has {n} tokens, {needs}: lower it or prepare more text")
        return n

    def _read(self, split, start, into):
        """Fill the 1-D array `into` with the ids from `start` on, and check them."""
        unread = memoryview(into).cast("B")
        with self._lock:
            self._files[split].seek(start * self.dtype.itemsize)
            while len(unread):
                got = self._files[split].readinto(unread)
                if not got:
                    raise UserError(f"{self._path(split)} became shorter while it was read")
                unread = unread[got:]
        if into.max() >= self.vocab_size:
            at = int(np.argmax(into >= self.vocab_size))
            raise UserError(
                f"{self._path(split)}: id {into[at]} at position {start + at} is outside the vocabulary of "
                f"{self.vocab_size}: the file was written with another tokenizer; {_remedy(self.folder)}"
            )


# --- order ---


def sample_starts(sample: np.ndarray, n: int, block_size: int, seed: int) -> np.ndarray:
    """Where in a split of n ≥ T + 1 tokens each training sample starts: (B,) uint64 → (B,) uint64."""
    T = block_size
    n_blocks = max(1, (n - T) // T)
    epoch, place = np.divmod(sample, np.uint64(n_blocks))
    key = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) ^ epoch)
    offset = _mix(key) % np.uint64(n - n_blocks * T)  # up to the last that fits, so that no token is left out for ever
    return offset + _permute(place, n_blocks, key) * np.uint64(T)


def _permute(place: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Each `place` < n → its place in the permutation of 0 … n-1 that its `key` selects. All (B,) uint64.

    A Feistel network is a permutation of 2^2h numbers, whatever it mixes in (Luby and Rackoff 1988). With the
    smallest such power ≥ n, a number that it sends to n or above is sent on until it comes back below n: that
    is a permutation of 0 … n-1 (Black and Rogaway 2002), in less than four steps on average.
    """
    bits = max(1, ((n - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(bits), np.uint64(2**bits - 1)
    place = place.copy()
    walking = np.arange(len(place))
    while walking.size:
        left, right = place[walking] >> half, place[walking] & mask
        for number in range(FEISTEL_ROUNDS):
            round_key = _mix(key[walking] ^ np.uint64(number))
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        place[walking] = left << half | right
        walking = walking[place[walking] >= np.uint64(n)]
    return place


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64, a hash of 64 bits to 64 bits (Steele, Lea and Flood 2014); products wrap around."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# --- the folder ---


def _read_meta(folder: Path) -> dict:
    """dtype, tokenizer and tokens per split (None for nanoGPT's folders, which don't say)."""
    path = folder / "meta.json"
    if not path.exists():
        pkl = folder / "meta.pkl"
        tokenizer = read_meta_pkl(pkl) if pkl.exists() else GPT2Tokenizer()
        return {"dtype": "uint16", "tokenizer": tokenizer, "tokens": None}
    try:
        meta = json.loads(path.read_bytes())
        tokenizer = from_description(meta["tokenizer"])
        dtype, tokens = meta["dtype"], {split: meta["tokens"][split] for split in SPLITS}
        if dtype not in ("uint16", "uint32") or meta["vocab_size"] != tokenizer.vocab_size:
            raise ValueError(f"{dtype} or vocab_size {meta['vocab_size']} don't fit the tokenizer")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is broken or was never finished ({reason}); {_remedy(folder)}") from error
    return {"dtype": dtype, "tokenizer": tokenizer, "tokens": tokens}


def _remedy(folder: Path) -> str:
    """The command that makes `folder` whole, or the data sets there are instead."""
    if (folder / "prepare.py").exists():
        return f"run python {folder / 'prepare.py'}"
    parent = folder.parent
    others = {path.parent.name for path in [*parent.glob("*/prepare.py"), *parent.glob("*/train.bin")]}
    return f"data sets in {parent}: {', '.join(sorted(others)) or 'none'}"


def _dtype_for(tokenizer: Tokenizer) -> np.dtype:
    return _numpy_dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(name).newbyteorder("<")
