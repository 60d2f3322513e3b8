"""What makes training fast on a CPU and changes nothing else: memory that is kept, attention in pieces, cheap dropout.

model.py is plain PyTorch, whose operators are at their best on GPUs. runtime.py calls this where a CPU trains.

B batch, T time, nh heads, hs head size.
"""

import ctypes
import math
from contextlib import suppress

import torch
import torch.nn as nn
import torch.nn.functional as F

ROWS = 128  # queries at a time: what lies to their right is never computed
WEIGHTS = 2**19  # attention weights at a time, of several heads: 2 MB in float32, about a core's cache
SHORT = 256  # keys, up to which torch's own attention is the slower one to train in a narrow dtype


def keep_memory():
    """Tell glibc's malloc to keep what is freed, for the next step. Elsewhere this does nothing.

    As it comes, it returns every large tensor to the system, which clears each page again when it is next touched: half
    the time of a step of the 124M model.
    """
    glibc("mallopt", -4, 0)  # M_MMAP_MAX: no mapping of its own for a large tensor
    glibc("mallopt", -1, 2**31 - 1)  # M_TRIM_THRESHOLD: the end of the heap stays


def give_back_memory():
    """Return to the system what was kept and isn't in use."""
    glibc("malloc_trim", 0)


def glibc(function, *arguments):
    with suppress(OSError, AttributeError, TypeError):  # macOS, Windows, musl
        getattr(ctypes.CDLL(None), function)(*arguments)


def speed_up(model):
    """Give the attention and dropout layers of a GPT the functions below, in place; its state stays as it is."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.__class__ = Dropout
        elif hasattr(module, "attend"):
            module.attend = attend
    model.empty = Scratch()


class Scratch:
    """torch.empty, but the same memory at each call while the shape stays the same.

    For the largest block of all: gaps that other tensors leave in malloc's heap rarely hold it, so that the heap grew.
    """

    memory = None

    def __call__(self, *shape, dtype, device):
        if self.memory is None or (self.memory.shape, self.memory.dtype) != (shape, dtype):
            self.memory = None  # first, so that there never are two
            self.memory = torch.empty(*shape, dtype=dtype, device=device)
        return self.memory


def attend(q, k, v, dropout_p=0.0, is_causal=True):
    """What F.scaled_dot_product_attention gives for a causal model, (B, nh, T, hs)."""
    slow_there = torch.finfo(q.dtype).bits < 32 and q.size(2) <= SHORT and torch.is_grad_enabled()
    if (dropout_p or slow_there) and q.shape == k.shape:  # with a cache they differ
        return CausalAttention.apply(q, k, v, dropout_p)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=is_causal)


class CausalAttention(torch.autograd.Function):
    """softmax(q kᵀ / √hs) v, a piece of the T × T weights at a time, and only those that aren't 0.

    torch's own leaves its fused path when there is dropout, and in a narrow dtype its backward pass is slow with few
    keys. Weights are kept for the backward pass, as torch keeps them with dropout.
    """

    @staticmethod
    def forward(ctx, q, k, v, p):
        ctx.shape, ctx.p = q.shape, p
        q = q / math.sqrt(q.size(-1))
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))  # (B·nh, T, hs)
        y, kept = torch.empty_like(q), []
        for heads, rows, past in pieces(*q.shape[:2]):
            scores = q[heads, rows] @ k[heads, past].mT
            n = scores.size(1)
            scores[:, :, -n:] += torch.full((n, n), -math.inf, dtype=q.dtype).triu_(1)
            weights = scores.softmax(-1)
            kept.append(weights)
            if p:
                kept.append(keep_mask(weights.shape, p))
                weights = weights * kept[-1]
            y[heads, rows] = weights @ v[heads, past]
        if p:
            y /= 1 - p
        ctx.save_for_backward(q, k, v, *kept)
        return y.view(ctx.shape)

    @staticmethod
    def backward(ctx, dy):
        q, k, v, *kept = ctx.saved_tensors
        dy, dtype, wide = dy.reshape(q.shape), q.dtype, torch.promote_types(q.dtype, torch.float32)
        if ctx.p:
            dy = dy / (1 - ctx.p)
        dq, (dk, dv) = torch.empty_like(q), torch.zeros(2, *q.shape, dtype=wide)
        kept = iter(kept)
        for heads, rows, past in pieces(*q.shape[:2]):
            weights = dropped = next(kept)
            dweights = dy[heads, rows] @ v[heads, past].mT
            if ctx.p:
                mask = next(kept)
                dropped = weights * mask
                dweights *= mask
            dscores = torch._softmax_backward_data(dweights, weights, -1, dtype)
            dq[heads, rows] = dscores @ k[heads, past]
            dk[heads, past] += dscores.mT @ q[heads, rows]
            dv[heads, past] += dropped.mT @ dy[heads, rows]
        dq /= math.sqrt(q.size(-1))
        return *(grad.to(dtype).view(ctx.shape) for grad in (dq, dk, dv)), None


def pieces(heads, T):
    """→ slices of (heads, rows, the columns that those rows see) that together make up the causal weights."""
    for first in range(0, T, ROWS):
        rows, past = slice(first, min(first + ROWS, T)), slice(min(first + ROWS, T))
        together = max(1, WEIGHTS // (min(ROWS, T) * past.stop))
        for head in range(0, heads, together):
            yield slice(head, head + together), rows, past


class Dropout(nn.Dropout):
    """nn.Dropout, with a mask that costs a tenth."""

    def forward(self, x):
        return Masked.apply(x, self.p) if self.training and self.p else x


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        mask = keep_mask(x.shape, p)
        ctx.p = p
        ctx.save_for_backward(mask)
        return (x * mask).div_(1 - p)

    @staticmethod
    def backward(ctx, dy):
        (mask,) = ctx.saved_tensors
        return (dy * mask).div_(1 - ctx.p), None


def keep_mask(shape, p):
    """1 where dropout keeps a number, else 0, as int8; 1 has probability 1 - p to within 2⁻¹⁷, by 16 random bits each.

    torch's bernoulli_ takes ten times as long. The same numbers as bool would be multiplied with three times slower.
    """
    n = math.prod(shape)
    bits = torch.randint(-(2**63), 2**63 - 1, (-(-n // 4),)).view(torch.int16)[:n]
    return bits.ge_(min(round(p * 2**16) - 2**15, 2**15 - 1)).to(torch.int8).view(shape)
