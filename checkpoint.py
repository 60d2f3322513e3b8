"""Training state ↔ disk. A checkpoint is one file that is whole or absent, and that can't execute anything.

It holds nanoGPT's keys (model, optimizer, model_args, iter_num, best_val_loss, config) and the tokenizer, so it samples
after the data folder is gone. `ckpt.pt` is the latest, `best.pt` the best on validation, `*.prev.pt` a former run's in
the same folder. nanoGPT's own checkpoints load too.
"""

import json
import os
import shutil
from pathlib import Path

import torch

import configurator
from configurator import UserError
from fetch import write_whole
from model import GPT, PRETRAINED, GPTConfig

LATEST, BEST, METRICS = "ckpt.pt", "best.pt", "metrics.jsonl"


class OutDir:
    """What one run writes into out_dir: checkpoints, and metrics.jsonl with a JSON object a line.

    A new run's first checkpoint sets the files of a former run aside. A resumed run drops the metrics that it is about
    to measure again: lines of {"iter": N}, the update after N others, and {"step": N}, an evaluation after N updates.
    """

    def __init__(self, path, step, new_run):
        self.path, self.set_aside = path, new_run
        try:
            os.makedirs(path, exist_ok=True)
            kept = [] if new_run else [m for m in self._metrics() if m.get("iter", -1) < step >= m.get("step", -1)]
            lines = "".join(json.dumps(metric) + "\n" for metric in kept)
            if new_run and os.path.exists(self._file(METRICS)):
                self._set_aside(METRICS)
            write_whole(Path(self._file(METRICS)), lines.encode())
        except OSError as error:
            raise UserError(f"--out_dir={path} can't be written: {error}") from None

    def log(self, metric):
        """Append a line to metrics.jsonl."""
        with open(self._file(METRICS), "a", encoding="utf-8") as file:
            file.write(json.dumps(metric) + "\n")

    def save(self, state, best=False):
        """Write `state` (tensors and plain types) as the latest checkpoint, and as the best so far if it is → its path.

        Under a temporary name, flushed to the disk, then renamed: a kill at any instant leaves the old file or the new.
        Raises OSError.
        """
        temporary = self._file(f".{LATEST}.tmp")
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        for name in (LATEST, BEST) if self.set_aside else ():
            if os.path.exists(self._file(name)):
                self._set_aside(name)
        self.set_aside = False
        os.replace(temporary, self._file(LATEST))
        if best:
            _give_second_name(self._file(LATEST), self._file(BEST))
        return self._file(LATEST)

    def _file(self, name):
        return os.path.join(self.path, name)

    def _set_aside(self, name):
        stem, extension = os.path.splitext(name)
        os.replace(self._file(name), self._file(f"{stem}.prev{extension}"))

    def _metrics(self):
        try:
            with open(self._file(METRICS), encoding="utf-8") as file:
                for line in file:
                    try:
                        yield json.loads(line)
                    except ValueError:  # the last line of a run that was killed while it wrote
                        continue
        except FileNotFoundError:
            return


def _give_second_name(path, name):
    """Let `name` be the same file, without a second copy where the file system can; atomically too."""
    temporary = name + ".tmp"
    if os.path.exists(temporary):  # of a run that was killed between the next two lines
        os.remove(temporary)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    os.replace(temporary, name)


def load(path):
    """A checkpoint file, ours or nanoGPT's → its dict, weights under plain names. Raises UserError."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint") from None
    except Exception as error:  # a torn or foreign file fails in zipfile, pickle, torch or the operating system
        raise UserError(f"{path} can't be read as a checkpoint: {_first_line(error)}") from None
    for key in ("model", "model_args"):
        if not isinstance(state, dict) or not isinstance(state.get(key), dict):
            raise UserError(f"{path} is no checkpoint of a GPT: it has no '{key}'")
    # torch.compile once wrapped names in _orig_mod., DDP in module.; old attention kept its causal mask as a buffer.
    state["model"] = {
        name.removeprefix("module.").removeprefix("_orig_mod."): tensor
        for name, tensor in state["model"].items()
        if not name.endswith(".attn.bias")
    }
    state["model_args"].setdefault("gelu", "erf")  # nanoGPT's, which it doesn't record; ours always do
    return state


def model_of(state, path, **changed):
    """The GPT of a loaded checkpoint, with `changed` options of GPTConfig. Raises UserError."""
    try:
        args = configurator.known(GPTConfig, state["model_args"])
        config = configurator.build(GPTConfig, args)
        block_size = changed.pop("block_size", config.block_size)
        for name, value in changed.items():
            setattr(config, name, value)
        model = GPT.from_weights(config, state["model"])
        model.crop_block_size(block_size)
        return model
    except (UserError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def latest(out_dir):
    """The path of the checkpoint that a run in out_dir goes on from. Raises UserError when there is none."""
    path = os.path.join(out_dir, LATEST)
    if not os.path.isfile(path):
        raise UserError(f"{path}: no checkpoint to go on from; check --out_dir, or start with --init_from=scratch")
    return path


def pretrained(source, prefer=BEST, **changed):
    """Weights to start from or to sample → (GPT, tokenizer description or None, where they come from).

    source: one of PRETRAINED, a Hugging Face folder (config.json, model.safetensors), an out_dir or a checkpoint file.
    changed: block_size (crops) and dropout. Raises UserError.
    """
    if source in PRETRAINED or os.path.isfile(os.path.join(source, "config.json")):
        try:
            model = GPT.from_pretrained(source, **changed)
        except (ValueError, OSError) as error:
            hint = "; is the hub reachable? A local folder works too" if source in PRETRAINED else ""
            raise UserError(f"--init_from={source}: {_first_line(error)}{hint}") from None
        return model, {"type": "gpt2"} if model.config.vocab_size == 50257 else None, source
    names = (prefer, BEST, LATEST)
    candidates = [os.path.join(source, name) for name in names] if os.path.isdir(source) else [source]
    path = next((p for p in candidates if os.path.isfile(p)), None)
    if path is None:
        raise UserError(
            f"{source}: no checkpoint there. Wanted: a folder with {LATEST}, {BEST} or a Hugging Face config.json, "
            f"a checkpoint file, or one of {', '.join(PRETRAINED)}"
        )
    state = load(path)
    origin = f"{path} (iteration {state.get('iter_num', '?')}, val loss {float(state.get('best_val_loss', 'nan')):.4f})"
    return model_of(state, path, **changed), state.get("tokenizer"), origin


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]
