"""The network: exactly GPT-2, by counts, by its first loss, and by two other implementations of it."""

import math
import shutil
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model import GPT, GPTConfig, head_loss
from model_numpy import count_gpt2_params, gpt_logits, init_gpt

SIZES = {  # n_layer, n_embd, n_head
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}
# 50,257 tokens; padded to 50,304; without biases; untied
COUNTS = {
    "gpt2": (124_439_808, 124_475_904, 124_337_664, 163_037_184),
    "gpt2-medium": (354_823_168, 354_871_296, 354_551_808, 406_286_336),
    "gpt2-large": (774_030_080, 774_090_240, 773_521_920, 838_359_040),
    "gpt2-xl": (1_557_611_200, 1_557_686_400, 1_556_764_800, 1_638_022_400),
}
SMALL = dict(vocab_size=61, block_size=16, n_layer=2, n_head=4, n_embd=32)


def on_meta(**shape):
    """A model without memory, for counting."""
    with torch.device("meta"):
        return GPT(GPTConfig(**shape))


def of_size(name, vocab_size=50257, bias=True):
    n_layer, n_embd, n_head = SIZES[name]
    return on_meta(vocab_size=vocab_size, n_layer=n_layer, n_embd=n_embd, n_head=n_head, bias=bias)


def wild_model(seed=0, dtype=torch.float64, **shape):
    """A small model with weights far from their initialisation, so that nothing hides behind 0 biases and 1 gains."""
    model = GPT(GPTConfig(**{**SMALL, **shape})).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            gain = p.dim() == 1 and name.endswith("weight")
            p.copy_(torch.randn(p.shape, generator=generator, dtype=dtype) * 0.3 + float(gain))
    return model


def rigged_model(logits):
    """A model that gives these logits whatever it reads: all is 0 but the last bias, which picks column 0 of wte."""
    model = GPT(GPTConfig(vocab_size=len(logits), block_size=8, n_layer=1, n_head=1, n_embd=4)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.transformer.wte.weight[:, 0] = torch.tensor(logits)
        model.transformer.ln_f.bias[0] = 1.0
    return model


def random_ids(*shape, vocab_size=SMALL["vocab_size"], seed=0):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# -- counts and names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_every_gpt2_size_has_its_published_number_of_parameters(name):
    n_layer, n_embd, _ = SIZES[name]
    plain, padded, no_bias, untied = COUNTS[name]
    assert of_size(name).num_params() == count_gpt2_params(50257, 1024, n_embd, n_layer) == plain
    assert of_size(name, 50304).num_params() == count_gpt2_params(50304, 1024, n_embd, n_layer) == padded
    assert of_size(name, bias=False).num_params() == no_bias
    assert count_gpt2_params(50257, 1024, n_embd, n_layer, bias=False) == no_bias
    assert count_gpt2_params(50257, 1024, n_embd, n_layer, tied=False) == untied == plain + 50257 * n_embd


@pytest.mark.parametrize(
    "name, percent", [("gpt2", 31.0), ("gpt2-medium", 14.5), ("gpt2-large", 8.3), ("gpt2-xl", 5.2)]
)
def test_the_token_table_is_this_share_of_each_size(name, percent):
    model = of_size(name)
    assert 100 * model.transformer.wte.weight.numel() / model.num_params() == pytest.approx(percent, abs=0.05)


def test_parts_of_gpt2_have_their_published_numbers_of_parameters():
    model = of_size("gpt2")
    assert model.num_params(non_embedding=True) == 85_056_000
    assert sum(p.numel() for p in model.transformer.h[0].parameters()) == 7_087_872


def test_gpt_3_and_the_tiny_model_have_their_numbers_of_parameters():
    gpt3 = on_meta(vocab_size=50257, block_size=2048, n_layer=96, n_head=96, n_embd=12288)
    assert gpt3.num_params() == 174_604_259_328
    assert on_meta(vocab_size=56, block_size=64, n_layer=2, n_head=4, n_embd=64).num_params() == 107_776


def test_the_default_model_is_gpt2_with_a_padded_vocabulary():
    assert on_meta().num_params() == COUNTS["gpt2"][1]


def test_the_head_is_the_token_table_counted_once_and_listed_twice():
    model = GPT(GPTConfig(**SMALL))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.bias is None
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert {"lm_head.weight", "transformer.wte.weight"} <= set(model.state_dict())


def test_weights_have_gpt2s_names_and_nothing_else_is_saved():
    block = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    with_bias = [f"h.{i}.{part}" for i in range(SMALL["n_layer"]) for part in block] + ["ln_f"]
    expected = {f"transformer.{part}.{kind}" for part in with_bias for kind in ("weight", "bias")}
    tables = {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"}
    assert set(GPT(GPTConfig(**SMALL)).state_dict()) == expected | tables
    no_bias = {name for name in expected if name.endswith("weight")} | tables
    assert set(GPT(GPTConfig(**SMALL, bias=False)).state_dict()) == no_bias


# -- before any training --------------------------------------------------------------------------------------------


def test_init_draws_every_weight_with_its_deviation():
    torch.manual_seed(0)
    n_layer = 3
    model = GPT(GPTConfig(vocab_size=300, block_size=200, n_layer=n_layer, n_head=4, n_embd=192))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.02 / math.sqrt(2 * n_layer) if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.02), name
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name
        else:
            assert (p == (1.0 if name.endswith("weight") else 0.0)).all(), name


# At width 768 the first logits have a deviation of 0.02 * sqrt(768) = 0.55, which costs 0.55^2 / 2 = 0.15 nats
# over ln V; less with less width. That is GPT-2's own init, and far from the several nats of a wrong one.
@pytest.mark.parametrize("vocab_size, n_embd", [(50257, 128), (56, 64)])
def test_a_fresh_model_loses_ln_v(vocab_size, n_embd):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=vocab_size, block_size=64, n_layer=2, n_head=4, n_embd=n_embd))
    idx, targets = (random_ids(4, 64, vocab_size=vocab_size, seed=seed) for seed in (1, 2))
    assert model(idx, targets).item() == pytest.approx(math.log(vocab_size), abs=0.08)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [1, 7, 15])
def test_no_logit_before_a_changed_token_moves_by_a_bit(position, dtype):
    model = wild_model(dtype=dtype)
    idx = random_ids(3, 16)
    changed = idx.clone()
    changed[:, position] = (changed[:, position] + 1) % SMALL["vocab_size"]
    before, after = model(idx), model(changed)
    assert torch.equal(before[:, :position], after[:, :position])
    assert (before[:, position:] != after[:, position:]).any(-1).all()


def test_the_loss_is_the_mean_over_all_targets_but_minus_one():
    model = wild_model()
    idx, targets = random_ids(3, 16, seed=1), random_ids(3, 16, seed=2)
    targets[0, :10] = targets[2, 5] = -1
    logp = model(idx).log_softmax(-1)
    counted = [-logp[b, t, targets[b, t]].item() for b in range(3) for t in range(16) if targets[b, t] >= 0]
    assert len(counted) == 37
    assert model(idx, targets).item() == pytest.approx(np.mean(counted), abs=1e-12)


def plain_loss(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight), targets, ignore_index=-1)


def loss_and_gradients(loss_of, dtype=torch.float64, autocast=None, V=300):
    """[loss, gradient of x, of the weight] of 600 targets, which are three chunks, some of them -1; upstream is 3."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 8, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, 8, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(V, (600,), generator=generator)
    targets[::7] = targets[-88:] = -1  # the last chunk has none that counts
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = loss_of(x, weight, targets)
        with torch.no_grad():
            assert loss_of(x, weight, targets) == loss
    (3 * loss).backward()
    return [loss.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_of_a_large_vocabulary_is_that_of_the_whole_logits_and_so_are_its_gradients(compiled):
    ours = torch.compile(head_loss, fullgraph=True) if compiled else head_loss
    torch.testing.assert_close(loss_and_gradients(ours), loss_and_gradients(plain_loss), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype, digits", [(torch.bfloat16, 8), (torch.float16, 11)])
def test_under_autocast_the_loss_and_its_gradients_are_as_close_to_float32_as_the_plain_ones(dtype, digits):
    exact = loss_and_gradients(plain_loss, torch.float32)
    for found, expected in zip(loss_and_gradients(head_loss, torch.float32, dtype), exact, strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() < 2 * 2**-digits * expected.norm()


def test_the_logits_of_a_large_vocabulary_never_exist_as_a_whole():
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            largest = max([largest, *(t.numel() for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t))])
            return out

    model = GPT(GPTConfig(vocab_size=1000, block_size=64, n_layer=1, n_head=1, n_embd=8))
    idx = random_ids(32, 64, vocab_size=1000)  # 2048 rows: eight chunks
    with Watch():
        model(idx, idx).backward()
    assert largest == 256 * 1000


def test_every_parameter_receives_a_gradient_and_the_table_from_both_its_uses():
    model = wild_model()
    idx = random_ids(2, 16)
    model(idx, idx.roll(-1, 1)).backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())
    absent = next(v for v in range(SMALL["vocab_size"]) if v not in idx)  # only the head can reach it
    assert model.transformer.wte.weight.grad[absent].abs().max() > 0


def test_dropout_acts_in_training_and_is_off_in_evaluation():
    model, idx = wild_model(dropout=0.5), random_ids(2, 16)
    assert torch.equal(model(idx), model(idx))
    assert torch.equal(model(idx), wild_model(dropout=0.0)(idx))
    model.train()
    assert not torch.equal(model(idx), model(idx))


def test_a_sequence_longer_than_block_size_is_refused_with_both_numbers():
    with pytest.raises(AssertionError, match="17.*16"):
        wild_model()(random_ids(1, 17))


def test_a_width_that_the_heads_cannot_share_is_refused_by_name():
    with pytest.raises(ValueError, match="n_embd=30.*n_head=4"):
        GPT(GPTConfig(**{**SMALL, "n_embd": 30}))


# -- two other implementations ----------------------------------------------------------------------------------------


def load_numpy(P, n_head):
    """The PyTorch model with the weights of the NumPy one; nn.Linear stores (out, in), the NumPy model (in, out)."""
    (V, d), T, L = P["wte"].shape, len(P["wpe"]), sum(name.endswith("ln_1.weight") for name in P)
    model = GPT(GPTConfig(vocab_size=V, block_size=T, n_layer=L, n_head=n_head, n_embd=d)).double().eval()
    names = {"wte": "wte.weight", "wpe": "wpe.weight"}
    weights = {
        f"transformer.{names.get(name, name)}": torch.tensor(
            array.T if array.ndim == 2 and name not in names else array
        )
        for name, array in P.items()
    }
    model.load_state_dict({**weights, "lm_head.weight": weights["transformer.wte.weight"]})
    return model


@pytest.mark.parametrize(
    "V, T, d, L, n_head, B, t",
    [(56, 64, 64, 2, 4, 2, 64), (11, 5, 12, 1, 1, 3, 5), (97, 32, 48, 3, 6, 1, 20), (7, 9, 8, 4, 8, 4, 1)],
)
def test_numpy_and_pytorch_agree_to_rounding(V, T, d, L, n_head, B, t):
    rng = np.random.default_rng(V)
    P = {name: rng.normal(0, 0.3, a.shape) + (a.ndim == 1 and a[0]) for name, a in init_gpt(V, T, d, L, seed=0).items()}
    idx = rng.integers(0, V, (B, t))
    with torch.no_grad():
        logits = load_numpy(P, n_head)(torch.tensor(idx)).numpy()
    np.testing.assert_allclose(logits, gpt_logits(P, idx, n_head), rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """make(dtype, activation, prefixed) → a small wild GPT-2 of transformers' and the folder it is saved in."""
    import transformers

    def make(dtype=torch.float32, activation="gelu_new", prefixed=True):
        config = transformers.GPT2Config(
            vocab_size=97, n_positions=32, n_layer=3, n_head=4, n_embd=32, activation_function=activation,
            initializer_range=0.2, bos_token_id=None, eos_token_id=None, attn_implementation="eager",
        )  # fmt: skip
        torch.manual_seed(0)
        theirs = transformers.GPT2LMHeadModel(config).to(dtype).eval()
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                if p.dim() == 1:
                    p.normal_(mean=float("ln_" in name and name.endswith("weight")), std=0.3)
            theirs.transformer.wpe.weight.mul_(5)  # or it repeats one token, which would prove little
        folder = tmp_path_factory.mktemp("gpt2")
        (theirs if prefixed else theirs.transformer).save_pretrained(folder)
        return theirs, folder

    return make


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("block_size", [None, 12])
def test_a_hugging_face_gpt2_gives_the_same_logits_here(hugging_face, dtype, tolerance, block_size):
    theirs, folder = hugging_face(dtype)
    ours = GPT.from_pretrained(str(folder), block_size=block_size).to(dtype).eval()
    assert ours.config.block_size == (block_size or 32)
    idx = random_ids(3, ours.config.block_size, vocab_size=97)
    with torch.no_grad():
        torch.testing.assert_close(ours(idx), theirs(idx).logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize("block_size", [None, 12])
def test_a_hugging_face_gpt2_continues_greedily_with_the_same_tokens_here(hugging_face, block_size):
    theirs, folder = hugging_face(torch.float64)
    ours = GPT.from_pretrained(str(folder), block_size=block_size).double().eval()
    idx = random_ids(3, 4, vocab_size=97)
    new = ours.config.block_size - 4
    expected = theirs.generate(idx, attention_mask=torch.ones_like(idx), do_sample=False, max_new_tokens=new)
    assert len(expected[:, 4:].unique()) > 3
    assert ours.generate(idx, new, temperature=0).tolist() == expected.tolist()


def test_weights_load_whether_or_not_their_names_begin_with_transformer(hugging_face):
    loaded = [GPT.from_pretrained(str(hugging_face(prefixed=prefixed)[1])).state_dict() for prefixed in (True, False)]
    assert loaded[0].keys() == loaded[1].keys()
    assert all(torch.equal(loaded[0][name], loaded[1][name]) for name in loaded[0])


def test_mask_buffers_in_a_hugging_face_file_are_ignored(hugging_face):  # OpenAI's own files have them
    from safetensors.torch import load_file, save_file

    _, folder = hugging_face()
    before = GPT.from_pretrained(str(folder))
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    after = GPT.from_pretrained(str(folder))
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "gelu"])
def test_each_gelu_of_hugging_face_is_the_same_here(hugging_face, activation):
    theirs, folder = hugging_face(torch.float64, activation)
    ours = GPT.from_pretrained(str(folder)).double().eval()
    idx = random_ids(2, 32, vocab_size=97)
    with torch.no_grad():
        torch.testing.assert_close(ours(idx), theirs(idx).logits, rtol=0, atol=1e-10)


def test_pretrained_weights_stay_tied_and_trainable_also_when_cropped(hugging_face):
    model = GPT.from_pretrained(str(hugging_face()[1]), block_size=12)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    stored = model.transformer.wpe.weight.untyped_storage().nbytes()
    assert stored == 12 * 32 * 4  # a view of all 32 rows would be saved whole


def test_a_longer_block_size_than_the_weights_have_is_refused(hugging_face):
    with pytest.raises(ValueError, match="64.*32"):
        GPT.from_pretrained(str(hugging_face()[1]), block_size=64)


@pytest.mark.parametrize("change", [{"activation_function": "relu"}, {"n_inner": 99}, {"model_type": "llama"}])
def test_a_folder_that_is_no_gpt2_is_refused_by_what_differs(hugging_face, change):
    import json

    _, folder = hugging_face()
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=next(iter(change))):
        GPT.from_pretrained(str(folder))


def test_a_hub_out_of_reach_is_said_at_once_and_what_it_once_gave_needs_no_network(hugging_face, monkeypatch, tmp_path):
    import huggingface_hub as hub

    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    began = time.perf_counter()
    with pytest.raises(OSError, match="127.0.0.1:9 can't be reached"):
        GPT.from_pretrained("gpt2")
    assert time.perf_counter() - began < 6  # the library itself takes 24 s
    theirs, folder = hugging_face()
    repo = tmp_path / "models--openai-community--gpt2"  # the hub's cache, as its library lays it out
    shutil.copytree(folder, repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(hub, "get_session", None)
    assert torch.equal(GPT.from_pretrained("gpt2").transformer.wte.weight, theirs.transformer.wte.weight)


# -- generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size, prompt", [(16, 3), (16, 16), (16, 40), (7, 3), (2, 1)])
def test_greedy_with_a_cache_equals_greedy_without_also_past_block_size(block_size, prompt):
    model, idx = wild_model(block_size=block_size), random_ids(3, prompt)
    cached = model.generate(idx, 50, temperature=0)
    assert len(cached[:, prompt:].unique()) > 2  # a model that repeats itself would prove little
    assert cached.tolist() == model.generate(idx, 50, temperature=0, use_cache=False).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_a_narrow_dtype_greedy_with_a_cache_is_greedy_without_up_to_rounding(dtype):
    """Which of two tokens is likeliest can be a matter of the last bit, and that of the order of a sum."""
    model, idx = wild_model(dtype=dtype), random_ids(3, 3)
    cached = model.generate(idx, SMALL["block_size"] - 3, temperature=0)
    assert len(cached[:, 3:].unique()) > 2
    for t in range(3, SMALL["block_size"]):
        logits = model(cached[:, :t])[:, -1].float()
        behind = logits.amax(-1) - logits.gather(1, cached[:, t : t + 1])[:, 0]
        assert behind.max() <= 4 * torch.finfo(dtype).eps * logits.abs().max()


def test_greedy_takes_the_likeliest_token_of_the_whole_context():
    model, idx = wild_model(), random_ids(2, 3)
    expected = idx
    while expected.size(1) < SMALL["block_size"]:
        expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert model.generate(idx, SMALL["block_size"] - 3, temperature=0).tolist() == expected.tolist()


def test_a_prompt_longer_than_block_size_keeps_its_end():
    model, idx = wild_model(), random_ids(2, 40)
    long, short = model.generate(idx, 20, temperature=0), model.generate(idx[:, -16:], 20, temperature=0)
    assert long[:, :40].tolist() == idx.tolist()
    assert long[:, 40:].tolist() == short[:, 16:].tolist()


def test_each_row_of_a_batch_continues_as_if_it_were_alone():
    model, idx = wild_model(), random_ids(5, 4)
    together = model.generate(idx, 30, temperature=0)
    alone = [model.generate(row[None], 30, temperature=0)[0].tolist() for row in idx]
    assert together.tolist() == alone


def test_stream_yields_what_generate_returns_token_by_token():
    model, idx = wild_model(), random_ids(2, 4)
    streamed = list(model.stream(idx, 25, temperature=0))
    assert all(ids.shape == (2,) and not ids.requires_grad for ids in streamed)
    assert torch.stack(streamed, 1).tolist() == model.generate(idx, 25, temperature=0)[:, 4:].tolist()


def test_the_same_generator_seed_gives_the_same_samples_and_rows_differ():
    model, idx = wild_model(), random_ids(1, 4).expand(3, -1)

    def draw(seed, **options):
        return model.generate(
            idx, 30, temperature=5.0, generator=torch.Generator().manual_seed(seed), **options
        ).tolist()

    assert draw(1) == draw(1) == draw(1, use_cache=False)
    assert draw(1) != draw(2)
    first, second, third = draw(1)
    assert first != second != third != first


def test_top_k_and_top_p_together_draw_by_the_models_probabilities_among_those_left():
    shares = drawn(LOGITS, top_k=3, top_p=0.83)  # of 0.5, 0.3 and 0.15 the first two: 0.8 / 0.95 > 0.83 > 0.8
    assert shares == pytest.approx([0, 5 / 8, 0, 3 / 8], abs=0.04)


def drawn(logits, n=2000, **options):
    """How often each id follows, as shares, in n draws from a model with these logits."""
    model, idx = rigged_model(logits), torch.zeros(n, 1, dtype=torch.long)
    ids = model.generate(idx, 1, generator=torch.Generator().manual_seed(0), **options)[:, 1]
    return [round(count / n, 3) for count in ids.bincount(minlength=len(logits)).tolist()]


LOGITS = [math.log(p) for p in (0.15, 0.5, 0.05, 0.3)]  # in no order


def test_sampling_draws_with_the_models_probabilities():
    # 2000 draws: a share's standard deviation is at most 0.011
    assert drawn(LOGITS) == pytest.approx([0.15, 0.5, 0.05, 0.3], abs=0.04)


def test_temperature_divides_the_logits_and_0_takes_the_likeliest():
    hot = F.softmax(torch.tensor(LOGITS) / 2.0, dim=0).tolist()
    assert drawn(LOGITS, temperature=2.0) == pytest.approx(hot, abs=0.04)
    assert drawn(LOGITS, temperature=0) == [0, 1, 0, 0]
    assert drawn(LOGITS, temperature=1e-3) == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "top_k, allowed", [(0, {0, 1, 2, 3}), (1, {1}), (2, {1, 3}), (4, {0, 1, 2, 3}), (99, {0, 1, 2, 3})]
)
def test_top_k_draws_from_the_k_likeliest_and_any_k_beyond_v_is_all(top_k, allowed):
    assert {i for i, share in enumerate(drawn(LOGITS, top_k=top_k)) if share} == allowed


@pytest.mark.parametrize(
    "top_p, allowed", [(0.0, {1}), (0.4, {1}), (0.6, {1, 3}), (0.9, {0, 1, 3}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_draws_from_the_fewest_that_reach_p(top_p, allowed):
    assert {i for i, share in enumerate(drawn(LOGITS, top_p=top_p)) if share} == allowed


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 3}, {"top_k": 99}, {"top_p": 0.9}])
def test_no_id_that_only_pads_the_vocabulary_is_ever_drawn(options):
    shares = drawn([0.0, 1.0, 2.0, 0.5, 50.0, 60.0], n_vocab=4, **options)  # 4 and 5 pad, and the model loves them
    assert shares[4] == shares[5] == 0 and sum(shares) == pytest.approx(1, abs=0.01)
