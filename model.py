"""GPT-2 (Radford et al. 2019), the whole network: config, blocks, initialisation, loss, generation with a KV cache.

    model = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65))
    loss = model(idx, targets)                                    # training
    ids = GPT.from_pretrained("gpt2").eval().generate(idx, 20)    # OpenAI's weights

Nothing here knows about devices, ranks, files of ours or options: it is plain PyTorch, to be read and changed.
model_numpy.py is the same network written a second time; the tests hold one to the other.

Dimensions: B batch, T time, C width (n_embd), nh heads, hs head size = C / nh, V vocabulary, L layers.
"""

import json
import math
import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # OpenAI's four sizes, by their names on the hub


@dataclass
class GPTConfig:
    block_size: int = 1024  # T: the longest context, in tokens
    vocab_size: int = 50304  # V: GPT-2's 50257 rounded up to a multiple of 64, which matrix units like better
    n_layer: int = 12  # L
    n_head: int = 12  # nh
    n_embd: int = 768  # C
    dropout: float = 0.0  # for pretraining 0 is good, for small data or fine-tuning try 0.1 or more
    bias: bool = True  # biases in Linear and LayerNorm, as in GPT-2; False is a bit faster
    gelu: Literal["tanh", "erf"] = "tanh"  # GPT-2's tanh form; erf is what nanoGPT's own checkpoints were trained with

    def check(self):
        """Raise ValueError, naming the option, for a shape that no network can have."""
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if not 1 <= getattr(self, name) < 1e9:
                raise ValueError(f"{name} must be at least 1 and below 1e9, not {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout}")


class KVCache:
    """Keys and values of the tokens seen so far, for every layer, allocated once for a whole context."""

    def __init__(self, config):
        self.n_layer, self.block_size = config.n_layer, config.block_size
        self.keys = self.values = None  # (L, B, nh, block_size, hs) each, from the first append on
        self.length = 0  # tokens whose keys and values every layer holds

    def append(self, layer, k, v):
        """Keep k and v (B, nh, t, hs) of t new tokens → those of all tokens so far, (B, nh, length + t, hs)."""
        if self.keys is None:  # only k knows its dtype: under autocast it isn't the weights'
            B, nh, _, hs = k.shape
            self.keys, self.values = k.new_empty(2, self.n_layer, B, nh, self.block_size, hs)
        end = self.length + k.size(2)
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class CausalSelfAttention(nn.Module):
    attend = staticmethod(F.scaled_dot_product_attention)  # in training on a CPU cpu.py's

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.n_head, self.dropout = layer, config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # q, k and v in one product
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, cache=None):
        B, T, C = x.shape
        heads = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        q, k, v = heads  # (B, nh, T, hs) each
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        # Causal also with a cache: then x is either the whole prompt or one token, which sees everything before it.
        dropout = self.dropout if self.training else 0.0
        y = self.attend(q, k, v, dropout_p=dropout, is_causal=T > 1)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side again
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate="tanh" if config.gelu == "tanh" else "none")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The network. Parameters carry GPT-2's names, so a Hugging Face state dict maps one to one.

    Initialisation: every matrix and both tables N(0, 0.02²); the two projections that end a residual branch
    N(0, (0.02 / √(2L))²), so that the sum over 2L branches keeps its scale; biases 0; gains 1.
    """

    empty = staticmethod(torch.empty)  # memory for a chunk of logits; in training on a CPU cpu.py's

    def __init__(self, config):
        super().__init__()
        config.check()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
                ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied: one matrix, read in both directions
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(p, mean=0.0, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx, targets=None):
        """idx (B, T) int64 → logits (B, T, V); with targets (B, T) instead the mean loss, in nats a token, as a scalar.

        Targets of -1 don't count. T may be anything from 1 to block_size.
        """
        x = self.hidden(idx)
        if targets is None:
            return self.lm_head(x)
        return head_loss(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), self.empty)

    def hidden(self, idx, cache=None):
        """idx (B, T) → what the head reads, (B, T, C). With a cache, idx continues the tokens that it holds."""
        start = cache.length if cache is not None else 0
        T = idx.size(1)
        assert start + T <= self.config.block_size, f"{start + T} tokens don't fit block_size {self.config.block_size}"
        assert start == 0 or T == 1, "after the prompt a cache takes one token at a time"
        positions = torch.arange(start, start + T, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x, cache)
        if cache is not None:
            cache.length += T
        return self.transformer.ln_f(x)

    def num_params(self, non_embedding=False):
        """How many parameters, the tied table once. `non_embedding` leaves out both tables, as scaling laws do."""
        total = sum(p.numel() for p in self.parameters())
        tables = self.transformer.wte.weight.numel() + self.transformer.wpe.weight.numel()
        return total - tables if non_embedding else total

    def flops_per_token(self):
        """Forward and backward FLOPs a token: 6 a weight, 12·L·C·T for attention (PaLM, arXiv:2204.02311, app. B)."""
        c = self.config
        weights = self.num_params() - self.transformer.wpe.weight.numel()  # positions are looked up, not multiplied
        return 6 * weights + 12 * c.n_layer * c.n_embd * c.block_size

    # -- generation ------------------------------------------------------------------------------------------------

    def generate(self, idx, max_new_tokens, **sampling):
        """idx (B, t ≥ 1) int64 → idx with max_new_tokens more, (B, t + max_new_tokens); options as in `stream`."""
        return torch.cat([idx, *(ids[:, None] for ids in self.stream(idx, max_new_tokens, **sampling))], dim=1)

    @torch.no_grad()
    def stream(
        self, idx, max_new_tokens, *, temperature=1.0, top_k=0, top_p=1.0, n_vocab=None, use_cache=True, generator=None
    ):
        """Yield the next token of every row, (B,) int64, max_new_tokens times. Call eval() first, or dropout stays on.

        temperature 0 takes the likeliest token. top_k > 0 draws from the k likeliest, top_p < 1 from the fewest whose
        probabilities sum to at least top_p. Ids from n_vocab on, which only pad the table, are never drawn.

        A prompt longer than block_size keeps its end. When the context is full, its oldest eighth is dropped: every
        position shifts, so nothing cached stays true and the rest is read anew. An eighth makes that rare (a prefill
        each block_size / 8 tokens) and leaves at least 7/8 of the context in use; `use_cache` changes only the speed.
        """
        T = self.config.block_size
        window, new, cache = idx[:, -T:], None, None
        for _ in range(max_new_tokens):
            if window.size(1) > T:
                window, cache = window[:, -(T - T // 8) :], None
            if cache is None:
                cache, new = KVCache(self.config), window
            x = self.hidden(new, cache) if use_cache else self.hidden(window)
            logits = self.lm_head(x[:, -1])[:, :n_vocab]  # (B, n_vocab)
            ids = sample(logits, temperature, top_k, top_p, generator)
            yield ids
            new = ids[:, None]
            window = torch.cat([window, new], dim=1)

    # -- weights from elsewhere --------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, name_or_folder, block_size=None, dropout=0.0):
        """A Hugging Face GPT-2: one of PRETRAINED, from the hub, or a folder with config.json and model.safetensors.

        V stays 50257: zero rows added to real GPT-2 weights would win the softmax, whose logits lie around -30 to -100.
        block_size crops the position table. Raises ValueError for a folder that isn't a GPT-2, OSError for a file
        that can't be had.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            with open(_pretrained_file(name_or_folder, "config.json"), encoding="utf-8") as file:
                hf = json.load(file)
        except (UnicodeDecodeError, RecursionError, json.JSONDecodeError) as error:
            raise ValueError(f"{name_or_folder}: config.json is no JSON: {error}") from None
        config = _config_from_hf(hf, name_or_folder, dropout)
        weights = {}
        try:
            file = load_file(_pretrained_file(name_or_folder, "model.safetensors"))
        except SafetensorError as error:
            raise ValueError(f"{name_or_folder}: model.safetensors can't be read: {error}") from None
        for name, tensor in file.items():
            name = name.removeprefix("transformer.")  # some files have it, some don't
            if name.endswith((".attn.bias", ".attn.masked_bias")) or name == "lm_head.weight":
                continue  # causal masks, and the token table once more
            # Their Conv1D keeps its matrix as (in, out), nn.Linear as (out, in).
            conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            weights["transformer." + name] = tensor.t().contiguous() if conv1d else tensor
        try:
            model = cls.from_weights(config, weights)
        except ValueError as error:
            raise ValueError(f"{name_or_folder}: {error}") from None
        if block_size is not None:
            model.crop_block_size(block_size)
        return model

    @classmethod
    def from_weights(cls, config, weights):
        """A config and {name: tensor} → a model that holds those tensors, in float32, or float64 if all are.

        Raises ValueError where names or shapes don't fit the config, before memory is taken for any of them.
        """
        weights = {**weights, "lm_head.weight": weights.get("transformer.wte.weight")}

        def expect(name, shape):
            w = weights.get(name)
            if not isinstance(w, torch.Tensor) or w.shape != shape:
                found = tuple(w.shape) if isinstance(w, torch.Tensor) else "missing"
                raise ValueError(f"{name} should have shape {tuple(shape)} by the config, but is {found}")
            if not is_finite(w):
                raise ValueError(f"{name} isn't made of finite real numbers")

        layers = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
        if len(layers) != config.n_layer:
            raise ValueError(f"the weights have {len(layers)} layers, the config {config.n_layer}")
        expect("transformer.wte.weight", (config.vocab_size, config.n_embd))
        with torch.device("meta"):  # no memory, no time for an initialisation that is overwritten
            model = cls(config)
        for name, p in model.state_dict().items():
            expect(name, p.shape)
        if len(weights) > len(model.state_dict()):
            raise ValueError(f"unknown weights {sorted(set(weights) - set(model.state_dict()))[:3]}")
        dtype = torch.float64 if all(w.dtype == torch.float64 for w in weights.values()) else torch.float32
        # contiguous: a stranger's tensor may be one number that claims to be a matrix
        model.load_state_dict({name: w.to(dtype).contiguous() for name, w in weights.items()}, assign=True)
        model.lm_head.weight = model.transformer.wte.weight  # assigned one by one, tied again
        return model

    def crop_block_size(self, block_size):
        """Keep only the first block_size positions. Raises ValueError when there are fewer."""
        if block_size > self.config.block_size:
            raise ValueError(f"block_size={block_size}, but these weights have only {self.config.block_size} positions")
        self.config.block_size = block_size
        rows = self.transformer.wpe.weight.detach()[:block_size].clone()  # a view would keep all rows in checkpoints
        self.transformer.wpe = nn.Embedding.from_pretrained(rows, freeze=False)


def head_loss(x, weight, targets, empty=torch.empty):
    """x (N, C), weight (V, C), targets (N,) → mean cross-entropy of the logits x @ weight.T; -1 doesn't count.

    The same as F.cross_entropy(F.linear(x, weight), targets, ignore_index=-1), which is what a small vocabulary gets.
    `empty` makes the memory for a chunk of the logits.
    """
    if weight.size(0) <= 16 * weight.size(1):  # a token's logits take no more than its activations in one block
        return F.cross_entropy(F.linear(x, weight), targets, ignore_index=-1)
    return ChunkedCrossEntropy.apply(x, weight, targets, torch.is_grad_enabled(), empty) / (targets != -1).sum()


class ChunkedCrossEntropy(torch.autograd.Function):
    """`head_loss` as a sum, an eighth of the logits at a time: all of them at once would fill more than the network.

    Their gradient, softmax minus one-hot, needs no backward pass, so it is used up in the forward pass, chunk by chunk;
    no product is computed twice. It isn't divided by anything before that, or float16 would round most of it to 0.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, needs_grad, empty):
        device = x.device
        narrow = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if narrow else x.dtype
        rows = max(256, -(-len(x) // 8))  # fewer would starve the matrix product
        # A CPU goes on in pieces that stay in its cache: memory that it touches anew costs as much as the arithmetic.
        at_once, columns = (32, 4096) if device.type == "cpu" else (rows, weight.size(0))
        w, total, chunk = weight.to(dtype), 0.0, empty(rows, weight.size(0), dtype=dtype, device=device)
        grad_x, grad_w = (torch.empty_like(x), torch.zeros_like(weight)) if needs_grad else (x, None)
        for xs, ts, grad_xs in zip(x.to(dtype).split(rows), targets.split(rows), grad_x.split(rows), strict=True):
            logits = torch.mm(xs, w.T, out=chunk[: len(xs)])  # (rows, V)
            for some, target in zip(logits.split(at_once), ts.split(at_once), strict=True):
                logp = F.log_softmax(some, dim=-1, dtype=torch.promote_types(dtype, torch.float32))
                total = total + F.nll_loss(logp, target, ignore_index=-1, reduction="sum")
                if needs_grad:
                    grad, index = logp.exp_(), target.clamp_min(0)[:, None]
                    grad.scatter_(1, index, grad.gather(1, index) - 1)
                    some.copy_(grad * (target != -1)[:, None])  # the logits have served
            if needs_grad:
                grad_xs.copy_(logits @ w)
                for part, grad in zip(grad_w.split(columns), logits.split(columns, dim=1), strict=True):
                    part += grad.T @ xs  # summed in the weight's own precision
        if needs_grad:
            ctx.save_for_backward(grad_x, grad_w)
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad, grad_w * grad, None, None, None


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """logits (B, V) → one id a row, (B,). The options are those of GPT.stream."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # the likeliest at 0, however small temperature
    V, ids = logits.size(-1), None
    if 0 < top_k < V or top_p < 1:
        logits, ids = logits.topk(min(top_k or V, V))  # (B, k), falling: to draw from 200 costs less than from 50,257
    if top_p < 1:
        probs = logits.softmax(dim=-1)
        beyond = probs.cumsum(dim=-1) - probs >= top_p  # the mass that comes ahead of each token
        beyond[:, 0] = False  # the likeliest always stays, whatever top_p
        logits = logits.masked_fill(beyond, -math.inf)
    drawn = torch.multinomial(logits.softmax(dim=-1), num_samples=1, generator=generator)
    return (drawn if ids is None else ids.gather(-1, drawn)).squeeze(-1)


def is_finite(tensor):
    """Whether something from a file is a plain tensor of real numbers, all of them finite."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        return False
    real = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return tensor.dtype in real and bool(tensor.isfinite().all())


def _pretrained_file(name_or_folder, filename):
    """The path of a file in a local folder, or in the hub's cache, downloaded at first use. Raises OSError."""
    if name_or_folder not in PRETRAINED:
        return os.path.join(name_or_folder, filename)
    import huggingface_hub as hub

    repo = f"openai-community/{name_or_folder}"
    cached = hub.try_to_load_from_cache(repo, filename)
    if isinstance(cached, str):  # these files don't change, and to ask whether they did takes a network
        return cached
    if not hub.constants.HF_HUB_OFFLINE:
        try:  # the library itself would try for half a minute
            hub.get_session().head(hub.constants.ENDPOINT, timeout=5)
        except Exception as error:  # of whichever HTTP library it uses
            raise OSError(f"{hub.constants.ENDPOINT} can't be reached: {error}") from None
    return hub.hf_hub_download(repo, filename)


def _config_from_hf(hf, source, dropout):
    """transformers' GPT2Config as a dict → GPTConfig. Raises ValueError for what this network can't express."""
    if not isinstance(hf, dict):
        raise ValueError(f"{source}: config.json holds no object")
    gelus = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf"}
    fixed = {  # option: the value that GPT-2 has, which is also transformers' default
        "model_type": "gpt2", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "tie_word_embeddings": True,
        "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
    }  # fmt: skip
    for name, value in fixed.items():
        if hf.get(name, value) != value:
            raise ValueError(f"{source}: config.json has {name}={hf[name]!r}; a GPT-2 has {value!r}")
    if hf.get("n_inner") not in (None, 4 * hf.get("n_embd", 0)):
        raise ValueError(f"{source}: config.json has n_inner={hf['n_inner']}; a GPT-2 has 4 * n_embd")
    activation = hf.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in gelus:
        raise ValueError(f"{source}: config.json has activation_function={activation!r}; known are {sorted(gelus)}")
    try:
        return GPTConfig(
            block_size=hf["n_positions"], vocab_size=hf["vocab_size"], n_layer=hf["n_layer"], n_head=hf["n_head"],
            n_embd=hf["n_embd"], dropout=dropout, gelu=gelus[activation],
        )  # fmt: skip
    except KeyError as missing:
        raise ValueError(f"{source}: config.json has no {missing}") from None
