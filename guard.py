"""Which updates may reach the weights: not one with a non-finite loss or gradient, nor, if wished, a spike.

Judged on the device, without waiting for it: the optimizer's fused kernel reads the verdict itself and leaves weights,
moments and step counts as they were. The host looks only when it reads the loss for a log line anyway.
"""

import torch

HISTORY = 128  # accepted updates that a new one is compared with
ENOUGH = 32  # of them, before any is called a spike


class Guard:
    """Judges updates and counts refusals. Every rank sees the same reduced loss and gradient norm, so all agree."""

    def __init__(self, spike_zscore, device):
        self.spike_zscore = spike_zscore
        self.history = torch.full((2, HISTORY), torch.nan, device=device)  # loss, gradient norm; the newest last
        self.refused = torch.zeros(2, device=device)  # since the last `report`; in a row, up to now

    def judge(self, loss, grad_norm):
        """0-dim loss and gradient norm of an update → 1.0 if it must be skipped, else 0.0, 0-dim on the device."""
        values = torch.stack([loss, grad_norm]).float()  # (2,)
        bad = ~values.isfinite().all()
        if self.spike_zscore:
            known = ~self.history.isnan()
            mean = self.history.nanmean(dim=1)
            deviation = ((self.history - mean[:, None]) ** 2).nanmean(dim=1).sqrt()
            zscore = (values - mean) / deviation.clamp_min(1e-3 * mean.abs())  # a flat history calls nothing a spike
            bad |= (zscore > self.spike_zscore).any() & (known[0].sum() >= ENOUGH)
            self.history = torch.where(bad, self.history, torch.cat([self.history[:, 1:], values[:, None]], dim=1))
        skip = bad.float()
        self.refused = torch.stack([self.refused[0] + skip, (self.refused[1] + 1) * skip])
        return skip

    def report(self):
        """(updates skipped since the last report, skipped in a row up to now). Waits for the device."""
        skipped, in_row = map(int, self.refused.tolist())
        self.refused[0] = 0
        return skipped, in_row

    def forget(self):
        """Start anew, after a rollback."""
        self.history.fill_(torch.nan)
        self.refused.zero_()
