"""A model laid out for generation, which reads every weight once a token and computes little with it.

What this changes can't be trained any more; sample.py and bench.py call it, and model.py knows nothing of it.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import UserError


def ready(model, rt, rows, quantize="none"):
    """Move `model` to rt's device, in place, to generate `rows` samples at a time under rt.autocast() → itself.

    A token reads every weight once, so what counts is how they lie: here that is changed, and nothing can be
    trained any more. "int8" keeps the matrices, but not the tables, in 8 bits, scaled by row. Raises UserError
    where torch has no kernel for that.
    """
    if quantize == "int8" and (rt.device.type != "cpu" or not hasattr(torch, "_weight_int8pack_mm")):
        raise UserError("--quantize=int8 works with --device=cpu alone; a GPU is fast with --dtype=bfloat16")
    model.eval().to(rt.device)
    for parent in [*model.modules()]:
        for name, linear in [*parent.named_children()]:
            if type(linear) is not nn.Linear:
                continue
            if quantize == "int8":
                setattr(parent, name, Int8Linear(linear))
            elif rt.device.type == "cpu" and linear.weight.dtype == torch.float32:
                setattr(parent, name, _laid_out(linear, rows, rt.dtype, wide=name == "c_attn"))
            elif rt.dtype != torch.float32:
                linear.to(rt.dtype)  # once, not at each token
        if rt.device.type == "cpu" and hasattr(parent, "attend"):
            parent.attend = attend
    return model


def attend(q, k, v, **options):
    """Attention in the dtype of the cache, not autocast's: float32 takes a CPU a quarter of the time for one query."""
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.to(k.dtype), k, v, **options)


class Int8Linear(nn.Module):
    """A linear layer whose weights are whole numbers from -127 to 127, times a scale for each output."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach().float()  # (out, in)
        # torch's kernel is fast with bfloat16 alone, scales included, so the weights go by the rounded scale.
        self.scale = (weight.abs().amax(dim=1).clamp_min(1e-12) / 127).bfloat16()
        self.weight = (weight / self.scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x):
        y = torch._weight_int8pack_mm(x.flatten(0, -2).bfloat16(), self.weight, self.scale).float()
        return (y if self.bias is None else y + self.bias).unflatten(0, x.shape[:-1])


class PackedLinear(nn.Module):
    """A linear layer in oneDNN's own order of weights, for products with a few rows: twice as fast in bfloat16."""

    def __init__(self, linear, rows, dtype, wide):
        super().__init__()
        self.wide, self.dtype = wide, dtype
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype), rows)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def forward(self, x):
        y = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return y.float() if self.wide else y


def _laid_out(linear, rows, dtype, wide):
    """A float32 layer for a CPU that multiplies it with `rows` rows at a time in `dtype`; without gradients.

    `wide` asks for float32 results, as keys and values are kept that way.
    """
    onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if dtype == torch.float32:
        packs = onednn and rows > 1
    else:
        packs = onednn and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if packs:
        return PackedLinear(linear, rows, dtype, wide)
    weight = linear.weight.detach().to(dtype)
    if dtype == torch.float32 and linear.out_features >= linear.in_features:
        weight = weight.t().contiguous().t()  # column by column: for one row a third faster where columns are longer
    linear.weight = nn.Parameter(weight, requires_grad=False)  # a new one: the token table stays as it is
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach().to(dtype), requires_grad=False)
    return linear
