"""Parameter groups, AdamW and Muon; the average of the weights."""

import math
from contextlib import contextmanager

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from model import is_finite
from runtime import shard_like, whole

# Muon's quintic: five rounds bring singular values from [0.005, 1] to about [0.7, 1.2] (Jordan et al. 2024).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
MOMENTUM = 0.95


def make_optimizer(model, cfg, dtype=torch.float32):
    """cfg.optimizer for a GPT. Weight decay is on matrices and tables only: a gain or bias has nothing to overfit with.

    AdamW has two groups, the decayed first, each in the order of parameters(): nanoGPT's layout, so its states load.
    Muon takes the blocks' matrices and leaves tables, gains and biases to AdamW at the same rate. It multiplies in
    `dtype`, that of the run's products, but never in float16, whose range is too narrow.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in named.items() if p.dim() >= 2}
    vectors = {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0}
    options = {
        "lr": cfg.learning_rate,
        "betas": (cfg.beta1, cfg.beta2),
        "weight_decay": cfg.weight_decay,
        "fused": True,
    }
    if cfg.optimizer == "adamw":
        return torch.optim.AdamW([{"params": [*matrices.values()]}, vectors], **options)
    blocks = {name: p for name, p in matrices.items() if ".h." in name}
    tables = [p for name, p in matrices.items() if name not in blocks]
    return Muon(
        [
            {"params": [p for name, p in blocks.items() if "c_attn" in name], "parts": 3},  # q, k and v
            {"params": [p for name, p in blocks.items() if "c_attn" not in name], "parts": 1},
            {"params": tables},
            vectors,
        ],
        torch.float32 if dtype == torch.float16 else dtype,
        **options,
    )


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024) for groups with "parts", AdamW for the others.

    A matrix moves by its momentum made orthogonal, at the size of an AdamW update, 0.2·√max(rows, columns) (Moonlight,
    arXiv:2502.16982), so that one rate serves both. A matrix of `parts` stacked ones is orthogonalised part by part:
    c_attn is q, k and v, and as one matrix it would be another optimizer.

    torch.optim.Muon has the same mathematics, one matrix at a time, always in bfloat16 and without the switch that lets
    guard.py skip an update; ours puts matrices of one shape into one batch, in `product_dtype`.
    """

    def __init__(self, groups, product_dtype, **options):
        super().__init__(groups, **options)
        self.product_dtype = product_dtype

    @torch.no_grad()
    def step(self):
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group.get("parts")]
            super().step()
        finally:
            self.param_groups = groups
        same_shape = {}  # (rows, columns) of a part → what takes part in one batch: (matrix, its update, group)
        skip = getattr(self, "found_inf", None)
        applied = 1.0 if skip is None else 1 - skip
        for group in (group for group in groups if group.get("parts")):
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=torch.zeros((), device=p.device), momentum=torch.zeros_like(p))
                state["step"] += applied
                momentum = state["momentum"]
                # A skipped update leaves its momentum alone, whatever its gradient holds.
                grad = p.grad if skip is None else torch.where(skip > 0, momentum, p.grad)
                momentum.lerp_(grad, 1 - MOMENTUM)
                update = grad.lerp(momentum, MOMENTUM)  # Nesterov
                same_shape.setdefault((p.size(0) // group["parts"], p.size(1)), []).append((p, update, group))
        for (rows, columns), places in same_shape.items():
            # The orthogonal factor of a slice isn't the slice of the factor: every rank gathers and factors the whole.
            parts = [part for _, update, group in places for part in whole(update).chunk(group["parts"])]
            batch = iter(orthogonalise(torch.stack(parts).to(self.product_dtype)))
            for p, _, group in places:
                update = shard_like(torch.cat([next(batch) for _ in range(group["parts"])]), p)
                p.mul_(1 - group["lr"] * group["weight_decay"] * applied)
                p.sub_(update * (group["lr"] * 0.2 * math.sqrt(max(rows, columns)) * applied))


def orthogonalise(batch):
    """(N, rows, columns) → for each matrix U S V^T about U V^T, by Newton-Schulz; the singular values end near 1."""
    tall = batch.size(1) > batch.size(2)
    x = batch.mT if tall else batch  # the products below are with the smaller side squared
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)  # no singular value above 1
    a, b, c = NEWTON_SCHULZ
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Average:
    """An exponential moving average of a model's weights, by torch's own rule: w̄ ← decay · w̄ + (1 - decay) · w."""

    def __init__(self, model, decay):
        self.model, self.rule = model, get_ema_multi_avg_fn(decay)
        self.params = list(model.parameters())
        self.weights = [p.detach().clone() for p in self.params]

    def update(self):
        self.rule(self.weights, [p.detach() for p in self.params], None)

    @contextmanager
    def applied(self):
        """Inside, the model has the averaged weights. They change places, so that memory is taken for one at a time."""
        self._change_places()
        try:
            yield
        finally:
            self._change_places()

    def state_dict(self):
        """The averaged weights under their names, a tied one once."""
        return {name: weight for (name, _), weight in zip(self.model.named_parameters(), self.weights, strict=True)}

    def load_state_dict(self, saved):
        """Raises ValueError where `saved` isn't what state_dict() of such a model gives."""
        for name, weight in self.state_dict().items():
            if not (is_finite(saved.get(name)) and saved[name].shape == weight.shape):
                raise ValueError(f"the average of {name} is no finite tensor of shape {tuple(weight.shape)}")
            weight.copy_(shard_like(saved[name], weight))

    @torch.no_grad()
    def _change_places(self):
        if hasattr(self.model, "reshard"):  # fsdp would compute with what it gathered before
            self.model.reshard()
        for p, weight in zip(self.params, self.weights, strict=True):
            now = p.clone()
            p.copy_(weight)
            weight.copy_(now)


def load_state(optimizer, saved):
    """Moments and step counts from a saved state_dict(); rates, decay and betas stay those of this run's options.

    Raises ValueError where a moment isn't a finite tensor of its parameter's shape: the fused kernel trusts that it is.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if saved["state"].keys() != set(range(len(params))):
        raise ValueError(f"it has state for {len(saved['state'])} parameters, the model {len(params)}")
    for number, p in enumerate(params):
        for name, moment in saved["state"][number].items():
            shape = () if name == "step" else p.shape  # the whole's, of a shard too
            if not (is_finite(moment) and moment.shape == shape):
                raise ValueError(f"{name} of parameter {number} is no finite tensor of shape {tuple(shape)}")
            moment = moment.to(torch.float32 if name == "step" else p.dtype).contiguous()
            saved["state"][number][name] = shard_like(moment, p) if shape else moment
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, option in zip(optimizer.param_groups, options, strict=True):
        group.update(option)
