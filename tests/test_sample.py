"""sample.py: text from checkpoints, nothing that the model can't mean, errors that say what to do."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import ROOT, flags, here, make_dataset, run

import sample
import train
from sample import TextStream
from tokenizer import ByteTokenizer, from_description


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """out_dir of a trained model whose data folder is gone."""
    folder = tmp_path_factory.mktemp("run")
    data = make_dataset(folder / "data")
    assert here(train.main, *flags(data, folder / "out")).returncode == 0
    for path in data.iterdir():
        path.unlink()
    data.rmdir()
    return folder / "out"


def text_of(out, *more):
    done = here(sample.main, f"--out_dir={out}", "--device=cpu", "--max_new_tokens=40", "--start=to be", *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_checkpoint_samples_after_its_data_folder_is_gone(out):
    text = text_of(out, "--num_samples=3")
    samples = text.split("\n---------------\n")[:-1]
    assert len(samples) == 3 and len(set(samples)) == 3
    assert all(s.startswith("to be") and len(s) == len("to be") + 40 for s in samples)


def test_the_same_seed_gives_the_same_text_and_another_one_another(out):
    assert text_of(out) == text_of(out) != text_of(out, "--seed=2")


def test_temperature_0_is_greedy_whatever_the_seed(out):
    assert text_of(out, "--temperature=0", "--seed=1") == text_of(out, "--temperature=0", "--seed=2")
    assert text_of(out, "--top_k=1", "--num_samples=1") == text_of(out, "--temperature=0", "--num_samples=1")


def test_top_k_0_and_top_k_beyond_the_vocabulary_are_all_tokens(out):
    assert text_of(out, "--top_k=0") == text_of(out, "--top_k=100000")


def test_one_sample_is_printed_as_it_is_generated(out, monkeypatch):
    """Each token's text leaves before the next token is asked for."""
    printed = []
    monkeypatch.setattr("builtins.print", lambda *a, **k: printed.append("".join(map(str, a))))
    seen = []
    stream = sample.checkpoint.GPT.stream

    def watch(self, *args, **kwargs):
        for ids in stream(self, *args, **kwargs):
            seen.append(len("".join(printed[1:])))
            yield ids

    monkeypatch.setattr(sample.checkpoint.GPT, "stream", watch)
    sample.main([f"--out_dir={out}", "--device=cpu", "--max_new_tokens=10", "--start=to", "--num_samples=1"])
    assert seen == [2 + n for n in range(10)]


def test_a_sample_ends_where_the_stop_text_appears(out):
    free = text_of(out, "--num_samples=1", "--temperature=0").split("\n---------------")[0]
    stop = free[20:23]
    stopped = text_of(out, "--num_samples=1", "--temperature=0", f"--stop={stop}").split("\n---------------")[0]
    assert stopped == free[: free.index(stop, len("to be"))]


def test_a_prompt_may_come_from_a_file_be_empty_or_be_longer_than_block_size(out, tmp_path):
    path = tmp_path / "a prompt.txt"
    path.write_text("or not to be " * 9, encoding="utf-8")
    assert text_of(out, f"--start=FILE:{path}").startswith("or not to be " * 9)
    assert len(text_of(out, "--start=", "--num_samples=1").split("\n---------------")[0]) == 40


def test_a_character_that_the_model_never_saw_is_named(out):
    done = here(sample.main, f"--out_dir={out}", "--start=to bé")
    assert done.returncode == 2 and "'é'" in done.stderr and "U+00E9" in done.stderr


@pytest.mark.parametrize(
    "argv, message",
    [(["--out_dir=nowhere"], "nowhere: no checkpoint"), (["--start=FILE:nowhere.txt"], "nowhere.txt"),
     (["--temperature=-1"], "temperature"), (["--top_p=0"], "top_p"), (["--num_samples=0"], "num_samples"),
     (["--top_k=-1"], "top_k"), (["--init_from=gpt2"], "--init_from=gpt2: ")],
)  # fmt: skip
def test_a_mistake_ends_with_code_2_and_at_most_two_lines(out, argv, message):
    done = here(sample.main, f"--out_dir={out}", *argv)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) <= 2


def test_it_runs_from_another_folder_in_the_c_locale(out, tmp_path):
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run("sample.py", f"--out_dir={out}", "--start=FILE:é.txt", cwd=tmp_path, env=env)
    assert done.returncode == 2
    (tmp_path / "é.txt").write_text("to", encoding="utf-8")
    done = run("sample.py", f"--out_dir={out}", "--start=FILE:é.txt", "--num_samples=1", cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stdout.startswith("to"), done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has such a disk")
@pytest.mark.parametrize("script, more", [("sample.py", []), ("sample.py", ["--help"]), ("train.py", ["--help"])])
def test_output_to_a_full_disk_ends_in_one_line(out, script, more):
    command = [sys.executable, str(ROOT / script), f"--out_dir={out}", "--max_new_tokens=5", *more]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("No space left on device")
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_output_that_nobody_reads_ends_as_a_broken_pipe_does(out):
    command = [sys.executable, str(ROOT / "sample.py"), f"--out_dir={out}", "--max_new_tokens=400"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert "Traceback" not in process.communicate()[1] and process.returncode == 141


# ---- text, bit by bit


def streamed(data, stop):
    stream, pieces = TextStream(ByteTokenizer(), stop), []
    for byte in data:
        if not stream.done:
            pieces.append(stream.add(byte))
    return pieces, "".join(pieces) + stream.finish()


@given(st.text(), st.text(max_size=3))
def test_streamed_text_is_the_whole_text_up_to_stop_and_no_piece_holds_half_a_character(text, stop):
    pieces, whole = streamed(text.encode("utf-8"), stop)
    assert whole == (text[: text.index(stop)] if stop and stop in text else text)
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=4))
def test_no_part_of_stop_is_printed_before_it_is_known_not_to_be_stop(text, stop):
    assert streamed(text.encode(), stop)[1] == (text[: text.index(stop)] if stop in text else text)


@given(st.binary())
def test_bytes_that_are_no_text_are_replaced_as_in_a_whole_decode(data):
    assert streamed(data, "")[1] == data.decode("utf-8", errors="replace")


def test_padded_ids_are_never_drawn(out):
    """One row more in the table, along what the head reads: unmasked it would win every draw."""
    model, description, _ = sample.checkpoint.pretrained(str(out))
    state = torch.load(out / "ckpt.pt", weights_only=True)
    ids = torch.tensor([from_description(description).encode("to be or")])
    row = 1000 * model.eval().hidden(ids)[0].mean(0, keepdim=True).detach()
    state["model"]["transformer.wte.weight"] = torch.cat([state["model"]["transformer.wte.weight"], row])
    state["model_args"]["vocab_size"] += 1
    torch.save(state, out / "padded.pt")
    padded = sample.checkpoint.pretrained(str(out / "padded.pt"))[0].eval()
    assert padded.generate(ids, 1, temperature=0)[0, -1] == model.config.vocab_size
    done = here(
        sample.main, f"--init_from={out / 'padded.pt'}", "--start=to be or", "--device=cpu", "--max_new_tokens=50"
    )
    assert done.returncode == 0, done.stderr
