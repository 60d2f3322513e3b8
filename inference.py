"""A model laid out for generation, which reads every weight once a token and computes little with it.

What this changes can't be trained any more; sample.py and bench.py call it, and model.py knows nothing of it.
"""

import torch
import torch.nn as nn

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
            elif rt.dtype != torch.float32:
                linear.to(rt.dtype)  # once, not at each token
            elif rt.device.type == "cpu" and linear.weight.dtype == torch.float32:
                setattr(parent, name, _laid_out(linear, rows))
    return model


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
    """A linear layer in oneDNN's own order of weights, for products with a few rows."""

    def __init__(self, linear, rows):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def _laid_out(linear, rows):
    """A float32 layer for a CPU that multiplies it with `rows` rows at a time; without gradients."""
    if rows > 1:
        has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        return PackedLinear(linear, rows) if has_onednn else linear
    if linear.out_features >= linear.in_features:  # column by column: a third faster where columns are the longer ones
        columns = linear.weight.detach().t().contiguous()
        linear.weight = nn.Parameter(columns.t(), requires_grad=False)  # a new one: the token table keeps its rows
    return linear
