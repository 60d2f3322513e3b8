"""The bookkeeping of one run, so that nothing is lost: metrics, saves, skipped updates, roll-backs, stops.

What is learnt is train.py's. Its loop tells a Run what it did; a Run prints, logs and saves it, and ends the process
(SystemExit) where going on would do harm.
"""

import math
import shlex
import time
from dataclasses import asdict, replace
from datetime import timedelta

import torch

import checkpoint
from configurator import UserError
from guard import Guard
from optimizer import Average
from runtime import TIME_IS_UP

MAX_ROLLBACKS = 3  # in one run; a fourth would hardly help


class Run:
    """A run that goes on from the `state` of a checkpoint, or begins with {}.

    `now` is where it is (checkpoint.Progress), `guard` judges its updates, `average` is that of its weights, or None.
    `out` is the main rank's OutDir, None on the others and where nothing may be written.
    """

    def __init__(self, cfg, model, optimizer, tokenizer, state, out, rt):
        self.cfg, self.rt, self.out = cfg, rt, out
        self.model, self.optimizer, self.tokenizer = model, optimizer, tokenizer
        self.guard = Guard(cfg.spike_zscore, rt.device)
        self.average = Average(model, cfg.ema_decay) if cfg.ema_decay else None
        self.now = self._restore(state) if state else checkpoint.Progress()
        self.saved = self.now.iter_num if state else None  # iter_num of the latest checkpoint
        self.save = _saver(cfg.checkpoint_format)
        self.under_way = None  # of a save that may not be done: its iter_num, and the function that waits for it
        self.rollbacks = 0
        self.wandb = _start_wandb(cfg, self.now.wandb_run_id) if out and cfg.wandb_log else None
        if self.wandb:
            self.now.wandb_run_id = self.wandb.id
        if out and state:
            out.rewind(self.now.iter_num)
        self.eval_seconds = 0.0
        self._start_clock()

    # -- what train.py tells -------------------------------------------------------------------------------------------

    def updated(self, blocks):
        """An update was made; `blocks` have been dealt by now."""
        self.now.iter_num += 1
        self.now.blocks = blocks
        if self.average:
            self.average.update()

    def log_update(self, loss, grad_norm, lr):
        """Print and log the latest update (loss and gradient norm 0-dim), then see what the guard refused."""
        loss, grad_norm = loss.item(), grad_norm.item()  # waits for the device, so the clock is read after it
        cfg, step = self.cfg, self.now.iter_num - 1
        since, former_step, former_blocks = self.clock
        seconds = (time.perf_counter() - since) / (self.now.iter_num - former_step)
        left = cfg.max_iters - step - 1
        left = left * seconds + (left + 1) // cfg.eval_interval * self.eval_seconds
        tokens = (self.now.blocks - former_blocks) * cfg.block_size
        tokens_per_second = tokens / seconds / (self.now.iter_num - former_step)
        self.rt.print(
            f"iter {step}: loss {loss:.4f}, time {seconds * 1000:.2f}ms, lr {lr:.2e}, grad norm {grad_norm:.2f}, "
            f"{tokens_per_second:,.0f} tokens/s, mfu {self._mfu(tokens_per_second)}, "
            f"{timedelta(seconds=round(min(left, 1e10)))} left"
        )
        self._log(iter=step, loss=loss, lr=lr, grad_norm=grad_norm, ms=seconds * 1000)
        self._report_skips()
        self._start_clock()

    def evaluated(self, losses, began):
        """What train.evaluate gave for the weights as they are, begun at `began`: print, log, save if it is time."""
        step, last = self.now.iter_num, self.now.iter_num >= self.cfg.max_iters
        averaged = f", of the averaged weights {losses['average']:.4f}" if self.average else ""
        self.rt.print(f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}{averaged}")
        if self.cfg.eval_only:
            return
        self._log(step=step, **{f"{name}_loss": loss for name, loss in losses.items()})
        if not math.isfinite(sum(losses.values())):
            self._give_up("the model computes no finite loss any more")
        self._settle()
        loss, best = min((losses[name], name) for name in ("val", "average") if name in losses)
        former_best = self.now.best_val_loss
        if loss >= former_best:
            best = None
        self.now.evaluated, self.now.best_val_loss = step, min(former_best, loss)
        if last or step and (best or self.cfg.always_save_checkpoint and step != self.saved):
            self._save(best, former_best, final=last)
        self.eval_seconds = time.perf_counter() - began
        self._start_clock()

    def stop_if_told(self):
        """By a signal or the time limit: save, say how to go on, exit with 128 + the signal, or 0."""
        if reason := self.rt.stop_reason():
            self._settle()
            if self.now.iter_num != self.saved and not self.cfg.eval_only:
                self._save(final=True)
            out_dir = shlex.quote(f"--out_dir={self.cfg.out_dir}")
            how = f"python train.py --init_from=resume {out_dir} goes on"
            self.rt.print(f"stopped after {self.now.iter_num} updates; {how}")
            raise SystemExit(0 if reason == TIME_IS_UP else 128 + reason)

    # -- what follows from it ------------------------------------------------------------------------------------------

    def _start_clock(self):
        self.clock = time.perf_counter(), self.now.iter_num, self.now.blocks

    def _log(self, **values):
        if self.out:
            self.out.log(values)
        if self.wandb:
            self.wandb.log(values)

    def _save(self, best=None, former_best=None, final=False):
        """The latest checkpoint and, if its weights ("val") or their average ("average") are, the best.

        A full disk ends the run only where it ends anyway.
        """
        self._settle()
        now, cfg, average = self.now, self.cfg, self.average
        state = checkpoint.capture(now, self.model, self.optimizer, self.rt.scaler, average, cfg, self.tokenizer)
        if not self.rt.all_finite(state["model"].values()):
            self._give_up("a weight is no longer finite")
        best = state if best == "val" else {**state, "model": state["average"]} if best else None
        self.under_way = now.iter_num, former_best, self.save(state, best, cfg.out_dir, self.out, self.rt)
        # A run's first save sets files of a former run aside, metrics too, and no line must be logged meanwhile.
        if final or self.saved is None or cfg.checkpoint_format == "whole":
            self._settle(final)

    def _settle(self, final=False):
        """Wait for a save that is under way: then `saved` is what is on the disk, and all ranks know it."""
        if not self.under_way:
            return
        (iter_num, former_best, wait), self.under_way = self.under_way, None
        failed = torch.zeros(())
        try:
            wait()
        except OSError as error:  # a checkpoint.SaveError here, or another rank's
            failed += 1
            self.rt.print(error)
        if not self.rt.sum(failed):
            self.saved = iter_num
            return
        if former_best is not None:
            self.now.best_val_loss = former_best  # which is what best.pt has; a later one may be better than it
        if final:
            raise SystemExit(1)

    def _restore(self, state):
        """Optimizer, scaler and average from a checkpoint → its Progress."""
        blocks_per_iter = self.cfg.gradient_accumulation_steps * self.cfg.batch_size
        return checkpoint.restore(state, self.optimizer, self.rt.scaler, self.average, blocks_per_iter)

    def _report_skips(self):
        """Say which updates the guard refused; after too many in a row, go back or give up. Waits for the device."""
        skipped, in_row = self.guard.report()
        at = self.now.iter_num
        if skipped:
            self.rt.print(f"iter {at}: {skipped} update(s) skipped: loss or gradient not finite, or a spike")
            self._log(incident="skipped", at=at, count=skipped)
        if in_row < self.cfg.max_skips:
            return
        self._settle()
        if not (self.cfg.spike_zscore and self.saved and self.rollbacks < MAX_ROLLBACKS):
            self._give_up(f"{in_row} updates in a row had to be skipped")
        self.rollbacks += 1
        self.rt.print(f"iter {at}: back to the checkpoint of iteration {self.saved}, past the data since then")
        self._log(incident="rolled back", at=at, to=self.saved)
        earlier = checkpoint.load(checkpoint.latest(self.cfg.out_dir))
        checkpoint.set_weights(self.model, earlier["model"])
        self.now = replace(self._restore(earlier), blocks=self.now.blocks)
        self.guard.forget()
        if self.out:
            self.out.rewind(self.now.iter_num, but_incidents=True)

    def _give_up(self, why):
        self._settle()
        where = "nothing was saved"
        if self.saved:
            where = f"the last good checkpoint, of iteration {self.saved}, is in {self.cfg.out_dir}"
        self.rt.print(f"stopped at iteration {self.now.iter_num}: {why}; {where}. A lower --learning_rate may help")
        self._log(incident="stopped", at=self.now.iter_num)
        raise SystemExit(1)

    def _mfu(self, tokens_per_second):
        """Model FLOPs utilisation: the share of the devices' peak that went into the model's own arithmetic."""
        peak = self.rt.peak_flops()
        if not peak:
            return "n/a"
        return f"{self.model.flops_per_token() * tokens_per_second / (peak * self.rt.world_size):.1%}"


def _saver(checkpoint_format):
    """checkpoint.save or sharded.save. Raises UserError where the latter lacks a package."""
    if checkpoint_format == "whole":
        return checkpoint.save
    try:
        import safetensors.torch  # noqa: F401

        import sharded  # with DCP, whose import takes two seconds
    except ImportError as error:
        raise UserError(f"--checkpoint_format=sharded: {error}; pip install safetensors, or leave it off") from None
    return sharded.save


def _start_wandb(cfg, run_id):
    """A wandb run, the one of run_id if there is such. Raises UserError when it can't start."""
    try:
        import wandb

        options = {"project": cfg.wandb_project, "name": cfg.wandb_run_name, "config": asdict(cfg)}
        return wandb.init(**options, id=run_id, resume="allow")
    except Exception as error:  # not installed, not logged in, not reachable
        raise UserError(f"--wandb_log=True: {error}; `wandb login`, or WANDB_MODE=offline, or leave it off") from None
