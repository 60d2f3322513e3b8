"""Train a GPT-2: from scratch, from a checkpoint, or from OpenAI's weights; on a laptop's CPU, one GPU or a cluster.

    python train.py config/train_shakespeare_char.py --batch_size=32
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    torchrun --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --nproc_per_node=8 train.py config/train_gpt2.py
    python train.py --init_from=resume --out_dir=out        # goes on, with the config it was started with

This file is the recipe, top to bottom: options, schedule, step, evaluation, loop. Ranks and devices are runtime.py's.

Dimensions: B batch_size, T block_size, V vocabulary.
"""

import math
import os
import platform
import time
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path

import torch

import checkpoint
import configurator
from configurator import UserError
from dataset import Dataset
from model import GPT, GPTConfig
from optimizer import load_state, make_optimizer
from runtime import Runtime, RuntimeConfig


@dataclass
class TrainConfig(GPTConfig, RuntimeConfig):
    """The defaults train GPT-2 124M on OpenWebText, the recipe of config/train_gpt2.py."""

    # what to train, on what
    init_from: str = "scratch"  # scratch, resume, gpt2 | gpt2-medium | gpt2-large | gpt2-xl, or a folder with weights
    dataset: str = "openwebtext"  # data/NAME with train.bin and val.bin, or a path to such a folder
    vocab_size: int = 0  # V; 0: the data set's, for GPT-2 tokens padded to 50304
    batch_size: int = 12  # B: blocks of block_size tokens in a micro-batch
    gradient_accumulation_steps: int = 40  # micro-batches an iteration, of all ranks together
    # AdamW
    learning_rate: float = 6e-4  # at its highest
    max_iters: int = 600_000  # updates in all; 600,000 of 0.5 M tokens are 300 B tokens
    weight_decay: float = 0.1  # on matrices and tables, not on gains and biases
    beta1: float = 0.9  # of the mean of the gradients
    beta2: float = 0.95  # of the mean of their squares; higher, such as 0.99, when an iteration has few tokens
    grad_clip: float = 1.0  # the norm that gradients are clipped to; 0: off
    # learning rate: linear warmup, then a cosine down to min_lr
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
    always_save_checkpoint: bool = True  # False: save only when the validation loss is the best so far, and at the end
    wandb_log: bool = False  # log to Weights & Biases too (WANDB_MODE=offline works)
    wandb_project: str = "owt"  # where the run appears
    wandb_run_name: str = "gpt2"  # as what

    def check(self):
        RuntimeConfig.check(self)
        GPTConfig.check(replace(self.model_config(), vocab_size=self.vocab_size or 1))
        for name in ("batch_size", "gradient_accumulation_steps", "eval_interval", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("vocab_size", "learning_rate", "max_iters", "weight_decay", "grad_clip", "warmup_iters",
                     "lr_decay_iters", "min_lr", "eval_iters"):  # fmt: skip
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number from 0 on, not {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), not {getattr(self, name)}")

    def model_config(self):
        return GPTConfig(**{f.name: getattr(self, f.name) for f in fields(GPTConfig)})


# ---- the recipe --------------------------------------------------------------------------------------------------


def learning_rate_at(step, cfg):
    """Linear warmup, above 0 from iteration 0 on, then a cosine from learning_rate to min_lr at lr_decay_iters."""
    if not cfg.decay_lr:
        return cfg.learning_rate
    decay_iters = cfg.lr_decay_iters or cfg.max_iters
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    if step >= decay_iters:
        return cfg.min_lr
    progress = (step - cfg.warmup_iters) / (decay_iters - cfg.warmup_iters)  # 0 to 1
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (cfg.learning_rate - cfg.min_lr)


def train_step(model, optimizer, data, step, cfg, rt):
    """One update of `model` (as rt.wrap returned it) → (mean loss of all micro-batches and ranks, gradient norm)."""
    micro_batches = rt.my_share(step, cfg.gradient_accumulation_steps)
    total = torch.zeros((), device=rt.device)
    for index in micro_batches:
        x, y = rt.to_device(*data.batch("train", index))  # (B, T) each
        with rt.micro_step(model, index, last=index == micro_batches[-1]):
            with rt.autocast():
                loss = model(x, y)
            rt.scaler.scale(loss / len(micro_batches)).backward()  # backward() sums; the step wants the mean
        total += loss.detach()
    rt.scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
    rt.scaler.step(optimizer)
    rt.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return rt.mean(total / len(micro_batches)), grad_norm


@torch.no_grad()
def evaluate(model, data, cfg, rt):
    """{split: mean loss a token}, over a fixed, evenly spread part of each split that the ranks share out."""
    model.eval()
    means = {}
    for split in ("train", "val"):
        sums = torch.zeros(2, dtype=torch.float64)  # nats, tokens
        for x, y in data.eval_batches(split, cfg.eval_iters, rt.rank, rt.world_size):
            tokens = (y >= 0).sum().item()  # the last block may be short
            x, y = rt.to_device(x, y)
            with rt.autocast():
                sums += torch.tensor([model(x, y).item() * tokens, tokens])
        nats, tokens = rt.sum(sums).tolist()
        means[split] = nats / tokens
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
    if cfg.init_from == "scratch":
        return cfg, None, None, {}
    if cfg.init_from == "resume":
        path = checkpoint.latest(cfg.out_dir)
        state = checkpoint.load(path)
        saved = configurator.known(TrainConfig, state.get("config", {}))
        cfg = configurator.build(TrainConfig, {**saved, **said})
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


def new_model(cfg, data):
    """A GPT with fresh weights, for the vocabulary of the data set unless vocab_size was said."""
    # Products run best when V is a multiple of 64; a small vocabulary isn't worth padding.
    padded = data.vocab_size if data.vocab_size < 1024 else -(-data.vocab_size // 64) * 64
    return GPT(replace(cfg.model_config(), vocab_size=cfg.vocab_size or padded))


def check_agreement(model, tokenizer, data, cfg):
    """Raise UserError unless the data set's ids mean to the model what they meant when it was trained."""
    if data.vocab_size > model.config.vocab_size:
        raise UserError(
            f"data set {cfg.dataset} has {data.vocab_size} token ids, the model only {model.config.vocab_size}: "
            "it would read past its table"
        )
    if tokenizer and tokenizer != data.tokenizer.describe():
        raise UserError(f"data set {cfg.dataset} was made with another tokenizer than the weights of {cfg.init_from}")


def restore(state, optimizer, rt):
    """A checkpoint's optimizer and scaler into ours. Raises UserError where there is none or it doesn't fit."""
    try:
        load_state(optimizer, state["optimizer"])
        rt.scaler.load_state_dict(state.get("scaler") or rt.scaler.state_dict())
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"the checkpoint's optimizer can't be resumed ({error!r}); to start afresh from its weights, "
            "name its folder as --init_from"
        ) from None


def start_wandb(cfg, rt, run_id):
    """This process's wandb run, the one of run_id if there is such, or None. Raises UserError when it can't start."""
    if not (cfg.wandb_log and rt.is_main and not cfg.eval_only):
        return None
    try:
        import wandb

        options = {"project": cfg.wandb_project, "name": cfg.wandb_run_name, "config": asdict(cfg)}
        return wandb.init(**options, id=run_id, resume="allow")
    except Exception as error:  # not installed, not logged in, not reachable
        raise UserError(f"--wandb_log=True: {error}; `wandb login`, or WANDB_MODE=offline, or leave it off") from None


# ---- the loop ----------------------------------------------------------------------------------------------------


@configurator.command
def main(argv):
    said = configurator.read(TrainConfig, argv)
    cfg, model, tokenizer, state = load_weights(configurator.build(TrainConfig, said), said)
    data = Dataset(data_folder(cfg.dataset), cfg.block_size, cfg.batch_size, cfg.seed)
    rt = Runtime(cfg)
    try:
        rt.check_accumulation(cfg.gradient_accumulation_steps)
        model = model or new_model(cfg, data)
        check_agreement(model, tokenizer, data, cfg)
        train(replace(cfg, vocab_size=model.config.vocab_size), model, data, state, rt)
    finally:
        rt.close()


def train(cfg, model, data, state, rt):
    """From the state of a checkpoint, or from {}, to max_iters updates."""
    ddp_model = rt.wrap(model)
    optimizer = make_optimizer(model, cfg.learning_rate, (cfg.beta1, cfg.beta2), cfg.weight_decay)
    if state:
        restore(state, optimizer, rt)
    step = state.get("iter_num", 0)  # updates done
    best_val_loss = float(state.get("best_val_loss", math.inf))
    evaluated = state.get("evaluated", step if state else None)  # at which step last; nanoGPT saves right after one
    wandb = start_wandb(cfg, rt, state.get("wandb_run_id"))
    out = checkpoint.OutDir(cfg.out_dir, step, new_run=not state) if rt.is_main and not cfg.eval_only else None

    def log(**values):
        if out:
            out.log(values)
        if wandb:
            wandb.log(values)

    def save(best):
        """The state after `step` updates, as the latest checkpoint and, if it is, as the best."""
        if out:
            path = out.save({
                "model": model.state_dict(), "model_args": asdict(model.config), "optimizer": optimizer.state_dict(),
                "scaler": rt.scaler.state_dict(), "iter_num": step, "evaluated": evaluated,
                "best_val_loss": best_val_loss, "config": asdict(cfg), "tokenizer": data.tokenizer.describe(),
                "wandb_run_id": wandb.id if wandb else state.get("wandb_run_id"),
                "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
            }, best)  # fmt: skip
            rt.print(f"saved {path}")

    tokens_per_iter = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size
    rt.print(f"{model.num_params():,} parameters on {rt}; {data}; {tokens_per_iter:,} tokens an iteration")
    start, since, timed, eval_seconds = step, time.perf_counter(), 0, 0.0
    while True:
        last = step >= cfg.max_iters
        if cfg.eval_only or evaluated != step and (last or step % cfg.eval_interval == 0):
            eval_began = time.perf_counter()
            losses = evaluate(model, data, cfg, rt)
            rt.print(f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
            if cfg.eval_only:
                return
            log(step=step, train_loss=losses["train"], val_loss=losses["val"])
            best, best_val_loss, evaluated = losses["val"] < best_val_loss, min(best_val_loss, losses["val"]), step
            if last or step > start and (best or cfg.always_save_checkpoint):
                save(best)
            eval_seconds = time.perf_counter() - eval_began
            since, timed = time.perf_counter(), 0
        if last:
            if start == step:
                rt.print(f"nothing to train: {step} updates are done, --max_iters={cfg.max_iters}")
            return
        lr = learning_rate_at(step, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss, grad_norm = train_step(ddp_model, optimizer, data, step, cfg, rt)
        timed += 1
        if step % cfg.log_interval == 0:
            loss = loss.item()  # waits for the device, so the clock is read after it
            seconds = (time.perf_counter() - since) / timed
            since, timed = time.perf_counter(), 0
            left = (cfg.max_iters - step - 1) * seconds + (cfg.max_iters - step) // cfg.eval_interval * eval_seconds
            rt.print(
                f"iter {step}: loss {loss:.4f}, time {seconds * 1000:.2f}ms, lr {lr:.2e}, grad norm {grad_norm:.2f}, "
                f"{tokens_per_iter / seconds:,.0f} tokens/s, mfu {mfu(model, tokens_per_iter / seconds, rt)}, "
                f"{timedelta(seconds=round(left))} left"
            )
            log(iter=step, loss=loss, lr=lr, grad_norm=grad_norm.item(), ms=seconds * 1000)
        step += 1


def mfu(model, tokens_per_second, rt):
    """Model FLOPs utilisation: the share of the devices' peak that went into the model's own arithmetic."""
    peak = rt.peak_flops()
    return f"{model.flops_per_token() * tokens_per_second / (peak * rt.world_size):.1%}" if peak else "n/a"


if __name__ == "__main__":
    main()
