"""Train a GPT-2: from scratch, from a checkpoint, or from OpenAI's weights; on a laptop's CPU, one GPU or a cluster.

    python train.py config/train_shakespeare_char.py --batch_size=32
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    torchrun --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --nproc_per_node=4 train.py config/train_gpt2.py
    python train.py --init_from=resume --out_dir=out        # goes on, with the config it was started with

This file is the recipe, top to bottom: options, schedule, step, evaluation, loop. Ranks and devices are runtime.py's,
metrics and saves run.py's.

Dimensions: B batch_size, T block_size, V vocabulary.
"""

import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch

import checkpoint
import configurator
import plan
import preflight
from configurator import UserError
from dataset import Dataset
from model import GPT, GPTConfig
from optimizer import make_optimizer
from run import Run
from runtime import Runtime, RuntimeConfig, is_out_of_memory


@dataclass
class TrainConfig(GPTConfig, RuntimeConfig):
    """The defaults train GPT-2 124M on OpenWebText, the recipe of config/train_gpt2.py."""

    # what to train, on what
    init_from: str = "scratch"  # scratch, resume, auto (resume if there is a checkpoint), gpt2 … gpt2-xl, or a folder
    dataset: str = "openwebtext"  # data/NAME with train.bin and val.bin, or a path to such a folder
    vocab_size: int = 0  # V; 0: the data set's, for GPT-2 tokens padded to 50304
    batch_size: int = 12  # B: blocks of block_size tokens in a micro-batch
    gradient_accumulation_steps: int = 40  # micro-batches an iteration, of all ranks together
    batch_warmup_iters: int = 0  # in the first half of these an iteration has a quarter of its micro-batches, then half
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, AdamW for the rest
    learning_rate: float = 6e-4  # at its highest
    max_iters: int = 600_000  # updates in all; 600,000 of 0.5 M tokens are 300 B tokens
    weight_decay: float = 0.1  # on matrices and tables, not on gains and biases
    beta1: float = 0.9  # of the mean of the gradients
    beta2: float = 0.95  # of the mean of their squares; higher, such as 0.99, when an iteration has few tokens
    grad_clip: float = 1.0  # the norm that gradients are clipped to; 0: off
    ema_decay: float = 0.0  # average the weights too, over about 1 / (1 - ema_decay) updates; 0: don't
    max_skips: int = 5  # updates in a row that a non-finite loss or gradient may cost before the run stops
    spike_zscore: float = 0.0  # skip updates whose loss or gradient norm is so many deviations off; 0: never
    # learning rate: linear warmup, then down to min_lr
    lr_schedule: Literal["cosine", "linear", "wsd"] = "cosine"  # wsd: stable, and linear in the last decay_frac
    decay_frac: float = 0.2  # the part of a wsd run in which the rate falls
    decay_lr: bool = True  # False: learning_rate throughout, without warmup
    warmup_iters: int = 2000  # in which the rate rises
    lr_decay_iters: int = 0  # where min_lr is reached; 0: max_iters
    min_lr: float = 6e-5  # about learning_rate / 10 (Chinchilla, arXiv:2203.15556)
    # evaluation, logging, saving
    eval_interval: int = 2000  # iterations between evaluations, each of which may save
    eval_iters: int = 200  # batches a split in an evaluation, always the same ones; 0: the whole validation set
    eval_only: bool = False  # evaluate once and exit, writing nothing
    log_interval: int = 10  # iterations between lines; more cost nothing on a CPU, and a synchronisation on a GPU
    out_dir: str = "out"  # where checkpoints go
    checkpoint_format: Literal["whole", "sharded"] = "whole"  # sharded: each rank writes a part, beside the training
    keep_checkpoints: int = 0  # how many of the latest checkpoints also stay under a name of their own
    plan: bool | str = False  # print what the run needs and exit: True for this machine, or such as "8 x A100 40GB"
    preflight: bool = False  # check that the ranks are alike and can talk, print what they are, and exit
    time_limit: float = 0.0  # minutes after which the run saves and ends by itself; 0: none
    always_save_checkpoint: bool = True  # False: save only when the validation loss is the best so far, and at the end
    wandb_log: bool = False  # log to Weights & Biases too (WANDB_MODE=offline works)
    wandb_project: str = "owt"  # where the run appears
    wandb_run_name: str = "gpt2"  # as what

    def check(self):
        RuntimeConfig.check(self)
        GPTConfig.check(replace(self.model_config(), vocab_size=self.vocab_size or 1))
        for name in ("batch_size", "gradient_accumulation_steps", "eval_interval", "log_interval", "max_skips"):
            if not 1 <= getattr(self, name) < 1e9:
                raise ValueError(f"{name} must be at least 1 and below 1e9, not {getattr(self, name)}")
        for name in ("vocab_size", "learning_rate", "max_iters", "weight_decay", "grad_clip", "spike_zscore", "min_lr",
                     "warmup_iters", "batch_warmup_iters", "lr_decay_iters", "eval_iters", "keep_checkpoints",
                     "time_limit"):  # fmt: skip
            if not 0 <= getattr(self, name) < 1e40:
                raise ValueError(f"{name} must be a number from 0 on, not {getattr(self, name)}")
        if self.decay_lr and self.min_lr > self.learning_rate:
            raise ValueError(f"min_lr={self.min_lr} must not be above learning_rate={self.learning_rate}")
        if not 0 < self.decay_frac <= 1:
            raise ValueError(f"decay_frac must be in (0, 1], not {self.decay_frac}")
        for name in ("beta1", "beta2", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), not {getattr(self, name)}")

    def model_config(self):
        return GPTConfig(**{f.name: getattr(self, f.name) for f in fields(GPTConfig)})


# ---- the recipe --------------------------------------------------------------------------------------------------


def learning_rate_at(step, cfg):
    """Linear warmup, above 0 from iteration 0 on, then from learning_rate to min_lr, reached at lr_decay_iters."""
    if not cfg.decay_lr:
        return cfg.learning_rate
    decay_iters = cfg.lr_decay_iters or cfg.max_iters
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    if step >= decay_iters:
        return cfg.min_lr
    progress = (step - cfg.warmup_iters) / (decay_iters - cfg.warmup_iters)  # 0 to 1
    match cfg.lr_schedule:
        case "cosine":
            height = 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            height = 1 - progress
        case "wsd":
            height = min(1, (decay_iters - step) / (cfg.decay_frac * decay_iters))
    return cfg.min_lr + height * (cfg.learning_rate - cfg.min_lr)


def micro_batches_at(step, cfg):
    """How many micro-batches iteration `step` has: while the gradient is large, a noisy one is as good."""
    if step < cfg.batch_warmup_iters / 2:
        return cfg.gradient_accumulation_steps // 4
    if step < cfg.batch_warmup_iters:
        return cfg.gradient_accumulation_steps // 2
    return cfg.gradient_accumulation_steps


def train_step(model, optimizer, guard, data, micro_batches, cfg, rt):
    """One update of `model` (as rt.wrap returned it), from these micro-batches, a range of indices.

    → (mean loss of all micro-batches and ranks, gradient norm before clipping), 0-dim on the device. An update that
    `guard` refuses leaves weights and optimizer as they are.
    """
    micro_batches = rt.my_share(micro_batches)
    total = torch.zeros((), device=rt.device)
    for index in micro_batches:
        x, y = rt.to_device(*data.batch("train", index))  # (B, T) each
        with rt.micro_step(model, index, last=index == micro_batches[-1]):
            with rt.autocast():
                loss = model(x, y)
            rt.scaler.scale(loss / len(micro_batches)).backward()  # backward() sums; the step wants the mean
        total += loss.detach()
    loss = rt.mean(total / len(micro_batches))
    rt.scaler.unscale_(optimizer)
    grad_norm = rt.clip_grad_norm_(model, cfg.grad_clip or math.inf)
    optimizer.found_inf = guard.judge(loss, grad_norm)  # the fused kernel's own switch, which GradScaler uses too
    optimizer.step()
    rt.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss, grad_norm


@torch.no_grad()
def evaluate(model, data, cfg, rt, average=None):
    """{split: mean loss a token}, over a fixed, evenly spread part of each split that the ranks share out.

    With an `average` of the weights also its loss on val, as "average". None if the run was told to stop meanwhile.
    """
    model.eval()
    passes = [("train", "train", nullcontext()), ("val", "val", nullcontext())]
    if average:
        passes.append(("average", "val", average.applied()))
    means = {}
    for name, split, weights in passes:
        sums = torch.zeros(2, dtype=torch.float64)  # nats, tokens
        with weights:
            for x, y in data.eval_batches(split, cfg.eval_iters, rt.rank, rt.world_size):
                if rt.stop_reason():
                    model.train()
                    return None
                tokens = (y >= 0).sum().item()  # the last block may be short, and a rank's last batch empty
                x, y = rt.to_device(x, y)
                with rt.autocast():
                    loss = model(x, y).item()
                sums += torch.tensor([loss * tokens if tokens else 0.0, tokens], dtype=torch.float64)
        nats, tokens = rt.sum(sums).tolist()
        means[name] = nats / tokens
    model.train()
    return means


# ---- what is trained ---------------------------------------------------------------------------------------------


def data_folder(dataset):
    """A name is a folder in data/ beside this file, from wherever the script is run; a path is itself."""
    return dataset if os.path.isdir(dataset) else str(Path(__file__).resolve().parent / "data" / dataset)


def load_weights(cfg, said):
    """What init_from names → (the whole config, model or None for scratch, its tokenizer's description, checkpoint).

    The architecture is that of the weights. Raises UserError where an option that was said contradicts it.
    """
    there = os.path.exists(os.path.join(cfg.out_dir, checkpoint.LATEST))
    if cfg.init_from == "scratch" or cfg.init_from == "auto" and not there:
        return cfg, None, None, {}
    if cfg.init_from in ("resume", "auto"):
        path = checkpoint.latest(cfg.out_dir)
        state = checkpoint.load(path)
        saved = configurator.known(TrainConfig, state.get("config", {}))
        cfg = configurator.build(TrainConfig, {**saved, **said, "out_dir": cfg.out_dir})  # which may have been moved
        model, tokenizer = checkpoint.model_of(state, path, dropout=cfg.dropout), state.get("tokenizer")
    else:
        crop = {"block_size": cfg.block_size} if "block_size" in said else {}
        model, tokenizer, _ = checkpoint.pretrained(cfg.init_from, dropout=cfg.dropout, **crop)
        state = {}
    architecture = asdict(model.config)
    for name in said.keys() & architecture.keys():
        if said[name] != architecture[name] and (name, said[name]) != ("vocab_size", 0):
            raise UserError(f"--{name}={said[name]} contradicts --init_from={cfg.init_from}, with {architecture[name]}")
    return replace(cfg, **architecture), model, tokenizer, state


def check_agreement(cfg, tokenizer, data):
    """Raise UserError unless the data set's ids mean to the model what they meant when it was trained."""
    if data.vocab_size > cfg.vocab_size:
        raise UserError(
            f"data set {cfg.dataset} has {data.vocab_size} token ids, the model only {cfg.vocab_size}: "
            "it would read past its table"
        )
    if tokenizer and data.tokenizer and tokenizer != data.tokenizer.describe():
        raise UserError(f"data set {cfg.dataset} was made with another tokenizer than the weights of {cfg.init_from}")


# ---- the loop ----------------------------------------------------------------------------------------------------


@configurator.command
def main(argv):
    said = configurator.read(TrainConfig, argv)
    cfg = configurator.build(TrainConfig, said)
    if cfg.preflight:
        return preflight.check(cfg, data_folder(cfg.dataset))
    cfg, model, tokenizer, state = load_weights(cfg, said)
    folder = data_folder(cfg.dataset)
    here = not cfg.plan or os.path.exists(os.path.join(folder, "train.bin"))
    data = Dataset(folder, cfg.block_size, cfg.batch_size, cfg.seed) if here else plan.NoData(folder, cfg.vocab_size)
    if not cfg.vocab_size:  # products run best when V is a multiple of 64; a small vocabulary isn't worth padding
        cfg = replace(cfg, vocab_size=data.vocab_size if data.vocab_size < 1024 else -(-data.vocab_size // 64) * 64)
    check_agreement(cfg, tokenizer, data)
    on_paper = {"device": "cpu", "dtype": "float32", "backend": "auto"} if isinstance(cfg.plan, str) else {}
    rt = Runtime(replace(cfg, **on_paper))
    try:
        if cfg.plan:
            del model, state  # of init_from: they'd count as memory of the program itself
            return plan.report(cfg, data, rt, train_step)
        rt.check_accumulation(cfg.gradient_accumulation_steps, parts=4 if cfg.batch_warmup_iters else 1)
        writes = rt.is_main and not cfg.eval_only
        out = checkpoint.OutDir(cfg.out_dir, not state, cfg.keep_checkpoints) if writes else None
        train(cfg, model or GPT(cfg.model_config()), data, state, out, rt)
    except RuntimeError as error:
        if lost := rt.lost_rank(error):
            print(lost, file=sys.stderr, flush=True)
            raise SystemExit(1) from None
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory: {str(error).strip().splitlines()[0]}\nLower --batch_size (--gradient_accumulation_steps "
            "makes up for it), --block_size, --n_embd or --n_layer"
        ) from None
    finally:
        rt.close()


def train(cfg, model, data, state, out, rt):
    """From the state of a checkpoint, or from {}, to max_iters updates; `out` is the main rank's OutDir."""
    wrapped = rt.wrap(model)
    optimizer = make_optimizer(model, cfg, rt.dtype)
    run = Run(cfg, model, optimizer, data.tokenizer, state, out, rt)
    tokens_per_iter = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size
    rt.print(f"{model.num_params():,} parameters on {rt}; {data}; {tokens_per_iter:,} tokens an iteration")
    if run.now.iter_num >= cfg.max_iters and state and not cfg.eval_only:
        rt.print(f"nothing to train: {run.now.iter_num} updates are done, --max_iters={cfg.max_iters}")
    rt.watch_signals(cfg.time_limit)
    while True:
        run.stop_if_told()
        step, last = run.now.iter_num, run.now.iter_num >= cfg.max_iters
        if cfg.eval_only or run.now.evaluated != step and (last or step % cfg.eval_interval == 0):
            began = time.perf_counter()
            losses = evaluate(model, data, cfg, rt, run.average)
            if losses is None:
                continue
            run.evaluated(losses, began)
        if last or cfg.eval_only:
            return
        lr = learning_rate_at(step, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr
        first = -(-run.now.blocks // cfg.batch_size)  # rounded up: batch_size may have changed since the checkpoint
        micro_batches = range(first, first + micro_batches_at(step, cfg))
        loss, grad_norm = train_step(wrapped, optimizer, run.guard, data, micro_batches, cfg, rt)
        run.updated(blocks=micro_batches.stop * cfg.batch_size)
        if step % cfg.log_interval == 0 or step + 1 == cfg.max_iters:
            run.log_update(loss, grad_norm, lr)


if __name__ == "__main__":
    main()
