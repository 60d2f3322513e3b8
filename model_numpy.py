"""GPT-2's forward pass in NumPy: slow, short and independent, the oracle that model.py is held to.

Nothing here is shared with the PyTorch model, so where the two agree to rounding, both are GPT-2 (or both
authors misread the paper the same way). Everything runs in float64.

    P = init_gpt(V=56, T=64, d=64, L=2, seed=0)
    logits = gpt_logits(P, idx, n_head=4)            # idx (B, T) integers -> (B, T, V)

Papers: Radford et al. 2019 (GPT-2); Vaswani et al. 2017 (attention); Hendrycks & Gimpel 2016 (GELU).
Dimensions: B batch, T time, V vocabulary, d width, L layers, nh heads, hs = d / nh head size.
"""

import numpy as np


def init_gpt(V, T, d, L, seed):
    """A freshly initialised GPT-2 as {name: array}; matrices are stored (in, out), so that y = x @ W + b.

    Names are those of GPT-2's released weights: wte (V, d), wpe (T, d), h.N.ln_1.weight (d,) and so on. There
    is no output matrix: the head is wte, transposed. Matrices are N(0, 0.02^2), except the two of each block
    that write into the residual stream: 2L of them add up there, so each starts 1/sqrt(2L) as large.
    """
    rng = np.random.default_rng(seed)

    def add_linear(name, n_in, n_out, std=0.02):
        P[f"{name}.weight"], P[f"{name}.bias"] = rng.normal(0.0, std, (n_in, n_out)), np.zeros(n_out)

    def add_norm(name):
        P[f"{name}.weight"], P[f"{name}.bias"] = np.ones(d), np.zeros(d)

    P = {"wte": rng.normal(0.0, 0.02, (V, d)), "wpe": rng.normal(0.0, 0.02, (T, d))}
    residual_std = 0.02 / np.sqrt(2 * L)
    for i in range(L):
        add_norm(f"h.{i}.ln_1")
        add_linear(f"h.{i}.attn.c_attn", d, 3 * d)
        add_linear(f"h.{i}.attn.c_proj", d, d, residual_std)
        add_norm(f"h.{i}.ln_2")
        add_linear(f"h.{i}.mlp.c_fc", d, 4 * d)
        add_linear(f"h.{i}.mlp.c_proj", 4 * d, d, residual_std)
    add_norm("ln_f")
    return P


def linear(P, name, x):
    """x (..., in) -> (..., out)."""
    return x @ P[f"{name}.weight"] + P[f"{name}.bias"]


def layer_norm(P, name, x):
    """x (..., d): each vector brought to mean 0 and variance 1, then scaled and shifted, both learned."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)  # of the population: divided by d, not by d - 1
    return centred / np.sqrt(variance + 1e-5) * P[f"{name}.weight"] + P[f"{name}.bias"]


def gelu(x):
    """The tanh approximation, which GPT-2 was trained with: up to 5e-4 away from the exact (erf) one."""
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def log_softmax(z):
    """z (..., V) -> log-probabilities. The maximum is subtracted first: exp overflows float64 above 709."""
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def attention(P, name, x, n_head):
    """Causal multi-head self-attention, x (B, T, d) -> (B, T, d); all heads and positions at once."""
    B, T, d = x.shape
    hs = d // n_head
    qkv = linear(P, f"{name}.c_attn", x)  # (B, T, 3d): q, k, v side by side, each nh heads of hs columns
    q, k, v = qkv.reshape(B, T, 3, n_head, hs).transpose(2, 0, 3, 1, 4)  # three of (B, nh, T, hs)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(hs)  # (B, nh, T, T): how much t (row) attends to each
    future = np.triu(np.ones((T, T), dtype=bool), k=1)
    weights = np.exp(log_softmax(np.where(future, -np.inf, scores)))  # exp(-inf) is exactly 0
    y = (weights @ v).swapaxes(1, 2).reshape(B, T, d)  # the heads, side by side again
    return linear(P, f"{name}.c_proj", y)


def gpt_logits(P, idx, n_head):
    """Token ids idx (B, T), T at most the position table's length -> logits (B, T, V)."""
    T = idx.shape[1]
    x = P["wte"][idx] + P["wpe"][:T]  # (B, T, d)
    for i in range(sum(name.endswith("ln_1.weight") for name in P)):
        x = x + attention(P, f"h.{i}.attn", layer_norm(P, f"h.{i}.ln_1", x), n_head)
        hidden = gelu(linear(P, f"h.{i}.mlp.c_fc", layer_norm(P, f"h.{i}.ln_2", x)))  # (B, T, 4d)
        x = x + linear(P, f"h.{i}.mlp.c_proj", hidden)
    return layer_norm(P, "ln_f", x) @ P["wte"].T


def tied_lm_loss_and_grad(E, A, idx, targets):
    """A language model with a tied head, as small as one can be: its loss and the gradient of its table.

        X = E[idx],  H = tanh(X A),  Z = H E^T,  loss = mean over n of -log softmax(Z_n)[targets_n]

    E (V, d), A (d, d), idx and targets (N,) integers -> loss, dE (V, d).

    E is used twice, so its gradient has two paths: through the head every row receives something, through
    the input only the rows of the tokens that occur, once for each time they occur.
    """
    n = np.arange(len(idx))
    X = E[idx]  # (N, d)
    H = np.tanh(X @ A)  # (N, d)
    logp = log_softmax(H @ E.T)  # (N, V)
    loss = -logp[n, targets].mean()

    dZ = np.exp(logp)  # d loss / d Z = (softmax(Z) - onehot(targets)) / N
    dZ[n, targets] -= 1.0
    dZ /= len(idx)
    dE = dZ.T @ H  # the head's path: (V, N) @ (N, d)
    dX = (dZ @ E * (1.0 - H**2)) @ A.T  # tanh' = 1 - tanh^2
    np.add.at(dE, idx, dX)  # the input's path; dE[idx] += dX would keep one of several equal ids only
    return loss, dE


def count_gpt2_params(V, T, d, L, tied=True, bias=True):
    """How many numbers a GPT-2 of this shape learns; heads do not appear, they only share out the width d."""
    matrices = d * 3 * d + d * d + d * 4 * d + 4 * d * d  # c_attn, c_proj, c_fc, c_proj: 12 d^2
    gains = 2 * d  # of ln_1 and ln_2
    biases = 3 * d + d + 4 * d + d + 2 * d  # of the four matrices, then of ln_1 and ln_2: 11 d
    block = matrices + gains + bias * biases
    final_norm = d + bias * d
    head = 0 if tied else V * d
    return V * d + T * d + L * block + final_norm + head
