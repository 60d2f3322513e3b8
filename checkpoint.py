"""Training state ↔ disk. A checkpoint is one file that is whole or absent, and that can't execute anything.

It holds nanoGPT's keys (model, optimizer, model_args, iter_num, best_val_loss, config) and the tokenizer, so it samples
after the data folder is gone. `ckpt.pt` is the latest, `best.pt` the best on validation, `previous-N/` holds a former
run's in the same folder. nanoGPT's own checkpoints load too.

With --checkpoint_format=sharded these files are small, and each names a folder `shards-ITERATION` beside it that holds
the numbers (sharded.py). The folder is there, whole, before the file is, and stays as long as a file names it.

    python checkpoint.py consolidate OUT_DIR        # makes whole files of them
"""

import itertools
import json
import math
import os
import pickle
import platform
import re
import shutil
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

import configurator
from configurator import UserError
from fetch import write_whole
from model import GPT, PRETRAINED, GPTConfig
from optimizer import load_state
from runtime import first_line, shard_like

LATEST, BEST, METRICS = "ckpt.pt", "best.pt", "metrics.jsonl"
SHARDS = r"shards-\d+(\.\d+)?"  # names of folders


def _is_count(value):
    return type(value) is int and -1 <= value < 2**62


PLAIN = {  # what the keys of a checkpoint may be, besides its weights
    "iter_num": lambda v: _is_count(v) and v >= 0, "blocks": lambda v: _is_count(v) and v >= 0, "evaluated": _is_count,
    "best_val_loss": lambda v: type(v) in (int, float) and not math.isnan(v), "config": lambda v: type(v) is dict,
    "optimizer": lambda v: type(v) is dict, "scaler": lambda v: type(v) is dict, "average": lambda v: type(v) is dict,
    "wandb_run_id": lambda v: v is None or type(v) is str,
    "weights": lambda v: v == "average", "shards": lambda v: type(v) is str and bool(re.fullmatch(SHARDS, v)),
}  # fmt: skip


class OutDir:
    """What one run writes into out_dir: checkpoints, and metrics.jsonl with a JSON object a line.

    A new run's first checkpoint sets the files of a former run aside, in previous-1, previous-2, …; until then its own
    metrics are metrics.new.jsonl. With keep=N the last N checkpoints also stay under names of their own,
    ckpt-ITERATION.pt. Raises UserError where the folder can't be written.
    """

    def __init__(self, path, new_run, keep=0):
        self.path, self.new_run, self.keep = path, new_run, keep
        self.metrics = "metrics.new.jsonl" if new_run and os.path.exists(self._file(METRICS)) else METRICS
        try:
            os.makedirs(path, exist_ok=True)
            write_whole(Path(self._file(".writable")), b"")
            os.remove(self._file(".writable"))
            if new_run:
                _remove_if_there(self._file("metrics.new.jsonl"))
        except OSError as error:
            raise UserError(f"--out_dir={path} can't be written: {error}") from None

    def log(self, metric):
        """Append a line to metrics.jsonl; what is no finite number becomes null, as JSON has no other way."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metric.items()}
        try:
            with open(self._file(self.metrics), "a", encoding="utf-8") as file:
                file.write(json.dumps(finite) + "\n")
        except OSError:  # a full disk costs a line, not the run
            pass

    def rewind(self, step, but_incidents=False):
        """Drop the metrics that a run which goes on after `step` updates is about to measure again.

        {"iter": N} is the update after N others, {"step": N} an evaluation after N updates, {"at": N} an incident,
        which happens again where a run resumes but not where it rolled back.
        """
        kept = [
            line
            for line in self._read_metrics()
            if line.get("iter", -1) < step >= line.get("step", -1) and (but_incidents or line.get("at", -1) <= step)
        ]
        try:
            write_whole(Path(self._file(self.metrics)), "".join(json.dumps(line) + "\n" for line in kept).encode())
        except OSError as error:
            raise UserError(f"{self._file(self.metrics)} can't be written: {error}") from None

    def save(self, state, best=None, shards=None):
        """Write `state` (tensors and plain types) as the latest checkpoint, and `best`, maybe the same → its path.

        `shards` is the folder with the numbers of states that have only shapes; it gets its name for good here.

        Under a temporary name, flushed to the disk, then renamed: a kill at any instant leaves the old file or the new.
        `best.pt` comes first: a run killed between the two resumes from before the evaluation and makes it again.
        Raises SaveError, the former `ckpt.pt` untouched, where there is no room or the disk fails.
        """
        latest = self._file(LATEST)
        temporary, other = self._file(f".{LATEST}.tmp"), self._file(f".{BEST}.tmp")
        alike = best is state
        try:
            os.makedirs(self.path, exist_ok=True)
            if shards:
                name = f"shards-{state['iter_num']:08d}"
                names = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(1)))
                where = {"shards": next(n for n in names if not os.path.exists(self._file(n)))}
                state, best = {**state, **where}, best and {**best, **where}
            _write(state, temporary)
            if best and not alike:
                _write(best, other)
            if self.new_run:
                self._set_former_run_aside()
            if shards:
                os.rename(shards, self._file(state["shards"]))
            if best and not alike:
                os.replace(other, self._file(BEST))
            elif best:
                _give_second_name(temporary, self._file(BEST))
            if self.keep:
                _give_second_name(temporary, self._file(f"ckpt-{state['iter_num']:08d}.pt"))
            os.replace(temporary, latest)
            for name in self._kept()[: -self.keep] if self.keep else ():
                os.remove(self._file(name))
            self.drop_shards()
        except (OSError, RuntimeError) as error:  # torch's writer turns the disk's errors into RuntimeErrors
            _remove_if_there(temporary)
            _remove_if_there(other)
            free = shutil.disk_usage(self.path).free if os.path.isdir(self.path) else 0
            needed = _nbytes(state) + (0 if alike else _nbytes(best))
            raise SaveError(
                f"{latest} was not saved, the former one stays: {first_line(error)}. "
                f"It needs {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free"
            ) from error
        return latest

    def drop_shards(self):
        """Remove the folders of shards that no checkpoint here names any more."""
        names = os.listdir(self.path)
        folders = {name for name in names if re.fullmatch(SHARDS, name)}
        for name in names if folders else ():
            if name.endswith(".pt"):
                try:
                    folders.discard(_read(self._file(name), mmap=True).get("shards"))
                except Exception:  # not to be read today, and perhaps tomorrow
                    return
        for name in folders:
            shutil.rmtree(self._file(name), ignore_errors=True)

    def _file(self, name):
        return os.path.join(self.path, name)

    def _kept(self):
        """The names that keep=N gave, the oldest file first."""
        names = [name for name in os.listdir(self.path) if re.fullmatch(r"ckpt-\d+\.pt", name)]
        return sorted(names, key=lambda name: os.stat(self._file(name)).st_mtime_ns)

    def _set_former_run_aside(self):
        """Give its files second names in a folder of their own, then take the first ones away, all but ckpt.pt's."""
        former = [name for name in (LATEST, BEST, *self._kept()) if os.path.exists(self._file(name))]
        if self.metrics != METRICS:
            former.append(METRICS)
        if former:
            number = next(n for n in itertools.count(1) if not os.path.exists(self._file(f"previous-{n}")))
            os.mkdir(self._file(f"previous-{number}"))
            for folder in (name for name in os.listdir(self.path) if re.fullmatch(SHARDS, name)):
                os.mkdir(self._file(os.path.join(f"previous-{number}", folder)))
                former = [*(os.path.join(folder, part) for part in os.listdir(self._file(folder))), *former]
            for name in former:
                _give_second_name(self._file(name), self._file(os.path.join(f"previous-{number}", name)))
            for name in former:
                if name != LATEST and os.sep not in name:  # which the new one replaces, and after it the shards
                    os.remove(self._file(name))
        if self.metrics != METRICS and os.path.exists(self._file(self.metrics)):
            os.replace(self._file(self.metrics), self._file(METRICS))
        self.new_run, self.metrics = False, METRICS

    def _read_metrics(self):
        try:
            with open(self._file(self.metrics), encoding="utf-8", errors="replace") as file:
                for line in file:
                    try:
                        metric = json.loads(line)
                    except ValueError:  # the last line of a run that was killed while it wrote
                        continue
                    if isinstance(metric, dict):
                        yield metric
        except FileNotFoundError:
            return


class SaveError(OSError):
    """A checkpoint could not be written; the run may go on and try again."""


def _give_second_name(path, name):
    """Let `name` be the same file, without a second copy where the file system can; atomically too."""
    temporary = name + ".tmp"
    _remove_if_there(temporary)  # of a run that was killed between the next two lines
    try:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
        os.replace(temporary, name)
    finally:
        _remove_if_there(temporary)


def _remove_if_there(path):
    if os.path.exists(path):
        os.remove(path)


def _nbytes(value):
    """Bytes of all tensors in nested containers, about what their file takes."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_nbytes, values))


@dataclass
class Progress:
    """Where a run is: with weights, optimizer and scaler all that it needs to go on. Its fields are keys on disk."""

    iter_num: int = 0  # updates done
    blocks: int = 0  # dealt out of the training split so far
    evaluated: int = -1  # iter_num of the last evaluation
    best_val_loss: float = math.inf
    wandb_run_id: str | None = None


def capture(now, model, optimizer, scaler, average, cfg, tokenizer):
    """All that a run is, in tensors (or shards of them) and plain types; `restore` and `model_of` are the way back."""
    weights = model.state_dict()
    del weights["lm_head.weight"]  # wte.weight again: what is gathered or written apart would be there twice
    state = {
        "model": weights, "model_args": asdict(model.config), "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(), **asdict(now), "config": asdict(cfg), "tokenizer": tokenizer.describe(),
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
    }  # fmt: skip
    return {**state, "average": average.state_dict()} if average else state


def save(state, best, out_dir, out, rt):
    """Gather what `capture` gave → a function that writes it, on the main rank, and raises SaveError.

    `best` is `state` itself, or `state` with other weights, or None. All ranks call both. sharded.save does the same in
    parts.
    """
    whole = rt.gather(state)
    if best is state:
        best = whole
    elif best:
        best = {**whole, "model": rt.gather(best["model"])}
        del best["average"]
    for found in (whole, best or whole):
        found["model"]["lm_head.weight"] = found["model"]["transformer.wte.weight"]
    return (lambda: rt.print(f"saved {out.save(whole, best)}")) if out else lambda: None


def set_weights(model, weights):
    """A checkpoint's weights into a model that has their shapes, sharded or not."""
    model.load_state_dict({name: shard_like(weights[name], p) for name, p in model.state_dict().items()})


def restore(state, optimizer, scaler, average, blocks_per_iter):
    """A checkpoint's optimizer, scaler and average into ours → its Progress. Raises UserError where they don't fit.

    Where ours has an average (or None) and the checkpoint none, that begins anew with the weights.
    """
    try:
        if average and "average" in state:
            average.load_state_dict(state.pop("average"))
        load_state(optimizer, state.pop("optimizer"))  # a shard of it may be all that fits for long
        scaler.load_state_dict(state.get("scaler") or scaler.state_dict())
        now = Progress(**{field.name: state[field.name] for field in fields(Progress) if field.name in state})
        if "blocks" not in state:  # nanoGPT's, which saves right after an evaluation
            now = replace(now, blocks=now.iter_num * blocks_per_iter, evaluated=now.iter_num)
        return replace(now, best_val_loss=float(now.best_val_loss))
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"the checkpoint's optimizer can't be resumed ({error!r}); to start afresh from its weights, "
            "name its folder as --init_from"
        ) from None


def load(path):
    """A checkpoint file, ours or nanoGPT's → its dict, weights under plain names. Raises UserError for anything else.

    What the file holds is checked for type, range and finiteness here; whether it fits a model or an optimizer, there.
    """
    try:
        state = _read(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint") from None
    except pickle.UnpicklingError:  # torch's text would advise to trust the file
        raise UserError(f"{path} can't be read as a checkpoint: it holds more than tensors and plain types") from None
    except Exception as error:  # a torn or foreign file fails in zipfile, pickle, torch or the operating system
        raise UserError(f"{path} can't be read as a checkpoint: {first_line(error)}") from None
    for key in ("model", "model_args"):
        if not isinstance(state, dict) or not isinstance(state.get(key), dict):
            raise UserError(f"{path} is no checkpoint of a GPT: it has no '{key}'")
    best = state.get("best_val_loss", math.inf)
    state["best_val_loss"] = best.item() if isinstance(best, torch.Tensor) and best.numel() == 1 else best
    for key, fits in PLAIN.items():
        if key in state and not fits(state[key]):
            raise UserError(f"{path}: '{key}' can't be {str(state[key])[:50]!r}")
    if name := state.pop("shards", None):
        import sharded  # and DCP with it, two seconds

        folder = os.path.join(os.path.dirname(path), name)
        try:
            state = sharded.fill(state, folder)
        except Exception as error:  # as above
            raise UserError(f"{path} needs {folder}, which can't be read: {first_line(error)}") from None
        if "weights" in state:  # best.pt of an averaged run
            state["model"] = state[state.pop("weights")]
        state["model"]["lm_head.weight"] = state["model"].get("transformer.wte.weight")
    # torch.compile once wrapped names in _orig_mod., DDP in module.; old attention kept its causal mask as a buffer.
    state["model"] = {
        str(name).removeprefix("module.").removeprefix("_orig_mod."): tensor
        for name, tensor in state["model"].items()
        if not str(name).endswith(".attn.bias")
    }
    state["model_args"].setdefault("gelu", "erf")  # nanoGPT's, which it doesn't record; ours always do
    return state


def _read(path, **how):
    return torch.load(path, map_location="cpu", weights_only=True, **how)


def _write(state, path):
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def consolidate(out_dir):
    """Make whole files of the checkpoints in out_dir that name shards, which go → their names. Raises UserError."""
    if not os.path.isdir(out_dir):
        raise UserError(f"{out_dir}: no such folder")
    out, done = OutDir(out_dir, new_run=False), []
    for name in (LATEST, BEST, *out._kept()):
        path = os.path.join(out_dir, name)
        if os.path.isfile(path) and "shards" in _read(path, mmap=True):
            _write(load(path), path + ".tmp")
            os.replace(path + ".tmp", path)
            done.append(name)
    out.drop_shards()
    return done


def model_of(state, path, **changed):
    """The GPT of a loaded checkpoint, with `changed` options of GPTConfig. Raises UserError."""
    try:
        args = configurator.known(GPTConfig, state["model_args"])
        config = configurator.build(GPTConfig, args)
        block_size = changed.pop("block_size", config.block_size)
        for name, value in changed.items():
            setattr(config, name, value)
        model = GPT.from_weights(config, state.pop("model"))
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


def pretrained(source, **changed):
    """Weights to start from or to sample → (GPT, tokenizer description or None, where they come from).

    source: one of PRETRAINED, a Hugging Face folder (config.json, model.safetensors), an out_dir or a checkpoint file.
    changed: block_size (crops) and dropout. Raises UserError.
    """
    if source in PRETRAINED or os.path.isfile(os.path.join(source, "config.json")):
        try:
            model = GPT.from_pretrained(source, **changed)
        except (ValueError, OSError) as error:
            hint = "; is the hub reachable? A local folder works too" if source in PRETRAINED else ""
            raise UserError(f"--init_from={source}: {first_line(error)}{hint}") from None
        return model, {"type": "gpt2"} if model.config.vocab_size == 50257 else None, source
    candidates = [os.path.join(source, name) for name in (BEST, LATEST)] if os.path.isdir(source) else [source]
    path = next((p for p in candidates if os.path.isfile(p)), None)
    if path is None:
        raise UserError(
            f"{source}: no checkpoint there. Wanted: a folder with {LATEST}, {BEST} or a Hugging Face config.json, "
            f"a checkpoint file, or one of {', '.join(PRETRAINED)}"
        )
    state = load(path)
    origin = f"{path} (iteration {state.get('iter_num', '?')}, val loss {float(state.get('best_val_loss', 'nan')):.4f})"
    return model_of(state, path, **changed), state.get("tokenizer"), origin


@configurator.command
def main(argv):
    if len(argv) != 2 or argv[0] != "consolidate":
        raise UserError("usage: python checkpoint.py consolidate OUT_DIR")
    names = consolidate(argv[1])
    print(f"{argv[1]}: {', '.join(names)} now whole" if names else f"{argv[1]}: nothing there is sharded")


if __name__ == "__main__":
    main()
