"""Parameter groups and AdamW."""

import torch


def make_optimizer(model, learning_rate, betas, weight_decay):
    """AdamW with decay on matrices and tables only: a gain or a bias has nothing to overfit with.

    Two groups, the decayed first, each in the order of parameters(): nanoGPT's layout, so its optimizer states load.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = params[0].device.type in ("cpu", "cuda", "mps")  # one kernel over all parameters, where there is one
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)


def load_state(optimizer, saved):
    """Moments and step counts from a saved state_dict(); rates, decay and betas stay those of this run's options."""
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, option in zip(optimizer.param_groups, options, strict=True):
        group.update(option)
