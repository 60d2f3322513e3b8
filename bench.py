"""Time what train.py and sample.py run, against this machine's own limits and, if asked, against transformers.

    python bench.py
    python bench.py --train=small,medium --generate=none --compare=transformers
    python bench.py --device=cuda --profile=True

A training row is train.py's train_step, a generation row sample.py's way to generate. Every figure is a median; what is
compared takes turns in one run, as a machine's speed drifts more between two runs than most changes gain.

B batch, T time (block_size), V vocabulary.
"""

import gc
import multiprocessing
import platform
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch

import configurator
from configurator import UserError
from guard import Guard
from inference import ready
from model import GPT
from optimizer import make_optimizer
from plan import RandomTokens
from runtime import Runtime, RuntimeConfig, is_out_of_memory
from train import TrainConfig, train_step

SHAPES = {
    "tiny": dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, vocab_size=64, dropout=0.1),
    "small": dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, vocab_size=65),
    "medium": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, vocab_size=65, dropout=0.2),
    "gpt2": dict(batch_size=1, vocab_size=50304),
}
ROWS = {  # by type of device, for "auto": (train, generate)
    "cuda": ("gpt2:8,gpt2:16,gpt2:32", "gpt2:1,gpt2:10"),
    "cpu": ("small,gpt2", "gpt2:1,gpt2:10"),
}
PROMPT = 32  # tokens, of a generation


@dataclass
class BenchConfig(RuntimeConfig):
    train: str = "auto"  # shapes, comma-separated: tiny, small, medium, gpt2, also as gpt2:8 for batch 8; or none
    generate: str = "auto"  # the same for generation, with a batch for each
    new_tokens: int = 32  # generated after a prompt of 32; both less in a short context
    quantize: Literal["none", "int8"] = "none"  # of generation, as in sample.py
    compare: Literal["none", "transformers", "autocast"] = "none"  # transformers too, in float32 or under autocast
    repeats: int = 5  # of each row, after a warm-up
    seconds: float = 60.0  # after which a row ends, once it was timed three times
    profile: bool = False  # also write a trace of each row, for chrome://tracing

    def check(self):
        super().check()
        for name in ("new_tokens", "repeats"):
            if not 1 <= getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be at least 1 and below 1e6, not {getattr(self, name)}")


def rows_of(wanted, default):
    """ "small,gpt2:8" → [(title, options of TrainConfig)]. Raises UserError for an unknown shape."""
    rows = []
    for title in (default if wanted == "auto" else wanted.replace("none", "")).split(","):
        name, _, batch = title.partition(":")
        if title and (name not in SHAPES or batch and not (batch.isdigit() and int(batch))):
            raise UserError(
                f"{title}: no such shape; there are {', '.join(SHAPES)}, with a batch as in gpt2:8, or none"
            )
        if title:
            shape = SHAPES[name]
            rows.append((title, {**shape, "batch_size": int(batch or shape["batch_size"])}))
    return rows


# ---- what is timed -----------------------------------------------------------------------------------------------


def training(cfg, rt):
    """(model, step): a function that makes the next update of train.py's and waits for it."""
    model = GPT(cfg.model_config())
    wrapped, data, guard = rt.wrap(model), RandomTokens(cfg), Guard(0, rt.device)
    optimizer = make_optimizer(model, cfg, rt.dtype)
    numbers = iter(range(10**9))

    def step():
        first = next(numbers)
        return train_step(wrapped, optimizer, guard, data, range(first, first + 1), cfg, rt)[0].item()

    return model, step


def training_of_transformers(cfg, device, dtype):
    """The same update of a GPT2LMHeadModel as its users write it, with products in `dtype`."""
    theirs, data = twin(GPT(cfg.model_config()), cfg.dropout).train().to(device), RandomTokens(cfg)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=cfg.learning_rate, fused=True)
    count = iter(range(10**9))

    def step():
        x = data.batch("train", next(count))[0].to(device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = theirs(x, labels=x).loss  # shifted in there
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def generation(model, prompt, cfg, rt):
    """A function that continues `prompt` (B, t) as sample.py does, with its defaults."""
    ready(model, rt, len(prompt), cfg.quantize)

    def run():
        with rt.autocast():
            return model.generate(prompt, cfg.new_tokens, temperature=0.8, top_k=200).tolist()

    return run


def generation_of_transformers(model_config, prompt, new_tokens, device, dtype):
    """The same by transformers' generate, its weights in `dtype`."""
    theirs = twin(GPT(model_config), 0.0).eval().to(device, dtype)
    theirs.generation_config.eos_token_id = None  # or some would end early
    options = dict(do_sample=True, temperature=0.8, top_k=200, max_new_tokens=new_tokens, pad_token_id=0)
    prompt = prompt.to(device)
    return lambda: theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options).tolist()


def twin(model, dropout):
    """transformers' GPT-2 with the weights of ours, on the CPU in float32."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, logging
    except ImportError:
        raise UserError("--compare needs transformers: pip install -r requirements-dev.txt") from None
    logging.set_verbosity_error()
    c = model.config
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=c.vocab_size, n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # theirs are (in, out)
    weights = {name: w.t() if name.endswith(matrices) else w for name, w in model.state_dict().items()}
    theirs.load_state_dict({name: w.detach().clone() for name, w in weights.items()})
    return theirs


class Elsewhere:
    """A function that another process makes, as make(*args), and calls: neither has the other's memory or settings."""

    def __init__(self, make, *args):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self):
        self.pipe.send(True)
        try:
            answer = self.pipe.recv()
        except EOFError:  # killed, perhaps for want of memory
            raise UserError("the process with transformers is gone") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self.process.terminate()
        self.process.join()


def _serve(pipe, make, args):
    run = None
    while pipe.recv():
        try:
            run = run or make(*args)
            pipe.send(run())
        except Exception as error:
            pipe.send(error)


# ---- the clock ---------------------------------------------------------------------------------------------------


def seconds_of(run):
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def timed(runs, cfg):
    """{name: function}, warmed up, called in turn → {name: [seconds]}."""
    times, began = {name: [] for name in runs}, time.perf_counter()
    for number in range(cfg.repeats):
        if number >= 3 and time.perf_counter() - began > cfg.seconds:
            break
        for name, run in runs.items():
            times[name].append(seconds_of(run))
    return times


def limits(rt):
    """{"FLOP/s", "bytes/s"}: functions that use this device's matrix units, and its memory, as far as they go."""
    n = 8192 if rt.device.type == "cuda" else 2048
    square = torch.randn(n, n, device=rt.device).to(rt.dtype)
    table = torch.randn(1024, 2**16, device=rt.device)  # 256 MB, more than any cache holds
    row = torch.randn(1, 1024, device=rt.device)
    return {
        "FLOP/s": (8 * n**3, lambda: [square @ square for _ in range(4)][0][0, 0].item()),
        "bytes/s": (4 * table.numel(), lambda: (row @ table)[0, 0].item()),
    }


def measure(runs, limit, cfg, rt, title):
    """The functions in `runs` beside one of `limits` → (seconds of ours, the limit's rate, ratio of ours to theirs).

    All are medians; the ratio is that of pairs, None without a pair.
    """
    work, exhaust = limit
    exhaust()
    times = timed({**runs, "limit": exhaust}, cfg)
    if "theirs" in runs:
        runs["theirs"].close()
    if cfg.profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if rt.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as trace:
            runs["ours"]()
        path = f"out-bench-{title.replace(':', '-')}.json"
        trace.export_chrome_trace(path)
        rt.print(f"wrote {path}")
    ratio = [a / b for a, b in zip(times["ours"], times["theirs"], strict=True)] if "theirs" in times else None
    return median(times["ours"]), work / median(times["limit"]), median(ratio) if ratio else None


# ---- the table ---------------------------------------------------------------------------------------------------

COLUMNS = "{:<22}{:>12}{:>12}{:>11}{:>14}{:>12}{:>18}"


def train_row(title, shape, cfg, rt, compare):
    """One line of the table: an update of `shape`."""
    cfg = replace(cfg, **shape)
    rt.reset_peak_memory()
    model, step = training(cfg, rt)
    step(), step()  # compiles, and allocates the moments
    peak, runs = rt.peak_memory(), {"ours": step}
    if compare.compare != "none":
        dtype = rt.dtype if compare.compare == "autocast" else torch.float32
        runs["theirs"] = Elsewhere(training_of_transformers, cfg, rt.device, dtype)
        runs["theirs"](), runs["theirs"]()
    seconds, rate, ratio = measure(runs, limits(rt)["FLOP/s"], compare, rt, f"train-{title}")
    tokens = cfg.batch_size * cfg.block_size / seconds
    flops = model.flops_per_token() * tokens
    mfu = f"{flops / rt.peak_flops():.0%}" if rt.peak_flops() else "n/a"
    return [f"train {title}", milliseconds(seconds), f"{tokens:,.0f}", mfu, f"{flops / rate:.0%}", peak, ratio]


def generate_row(title, shape, cfg, rt):
    """One line of the table: a generation; its limit is that every token reads every weight once."""
    model_config = replace(TrainConfig(), **{**shape, "dropout": 0.0}).model_config()
    rt.reset_peak_memory()
    model = GPT(model_config)
    T = model_config.block_size
    prompt = torch.randint(model_config.vocab_size, (shape["batch_size"], min(PROMPT, T // 2)), device=rt.device)
    cfg = replace(cfg, new_tokens=min(cfg.new_tokens, T - prompt.size(1)))  # transformers can't go past its context
    weights = model.num_params() - model.transformer.wpe.weight.numel()
    read = weights * (1 if cfg.quantize == "int8" else rt.dtype.itemsize) * cfg.new_tokens
    runs = {"ours": generation(model, prompt, cfg, rt)}
    runs["ours"]()
    peak = rt.peak_memory()
    if cfg.compare != "none":
        where = rt.device, rt.dtype
        runs["theirs"] = Elsewhere(generation_of_transformers, model_config, prompt, cfg.new_tokens, *where)
        runs["theirs"]()
    seconds, rate, ratio = measure(runs, limits(rt)["bytes/s"], cfg, rt, f"generate-{title}")
    per_token = seconds / cfg.new_tokens
    tokens = shape["batch_size"] / per_token
    share = f"{read / seconds / rate:.0%}"
    return [f"generate {title}", milliseconds(per_token), f"{tokens:,.0f}", "n/a", share, peak, ratio]


def milliseconds(seconds):
    return f"{seconds * 1e3:,.1f}" if seconds > 0.01 else f"{seconds * 1e3:.3f}"


def machine(rt):
    """What the figures are of."""
    threads = f", {torch.get_num_threads()} threads" if rt.device.type == "cpu" else ""
    return f"{rt}{threads}; torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"


@configurator.command
def main(argv):
    cfg = configurator.parse(BenchConfig, argv)
    rt = Runtime(cfg)
    train_rows, generate_rows = ROWS.get(rt.device.type, ROWS["cpu"])
    jobs = [(train_row, row) for row in rows_of(cfg.train, train_rows)]
    jobs += [(generate_row, row) for row in rows_of(cfg.generate, generate_rows)]
    base = TrainConfig(**{name: getattr(cfg, name) for name in ("device", "dtype", "compile", "seed")})
    base = replace(base, gradient_accumulation_steps=1)
    for number, (job, (title, shape)) in enumerate(jobs):
        try:
            row = job(title, shape, base, rt, cfg) if job is train_row else job(title, shape, cfg, rt)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            row = [f"{job.__name__.partition('_')[0]} {title}", "memory", "", "", "", None, None]
        if number == 0:  # only now is it known whether it compiles
            rt.print(machine(rt))
            rt.print(COLUMNS.format("", "ms", "tokens/s", "MFU", "of the limit", "peak GB", "to transformers"))
        *words, peak, ratio = row
        peak = f"{peak / 1e9:.2f}" if peak else "n/a"
        rt.print(COLUMNS.format(*words, peak, f"{ratio:.2f} of its time" if ratio else ""))
        torch.compiler.reset()  # the next shape is no variation of this one
        gc.collect()
    rt.print("ms: an update, or a token of each sample. limit: of an update, the rate of bare matrix products measured")
    rt.print("between its repetitions; of a token, reading all weights once at the rate of a bare product with them.")
    rt.close()


if __name__ == "__main__":
    main()
