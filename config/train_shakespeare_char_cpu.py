# A character GPT on Shakespeare for a machine without a GPU: 0.8 M parameters, about three minutes on two cores.
#   python data/shakespeare_char/prepare.py
#   python train.py config/train_shakespeare_char_cpu.py

out_dir = "out-shakespeare-char-cpu"
eval_interval = 1000
eval_iters = 0  # the whole validation set, a few seconds
log_interval = 100

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 12
block_size = 64

n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0  # it sees the text one and a half times: nothing to overfit yet

learning_rate = 3e-3  # so small a network stands three times what the usual recipe gives it, and learns faster
max_iters = 2000
min_lr = 3e-4
beta2 = 0.99
warmup_iters = 100

device = "cpu"
compile = False  # compiling takes longer than it would save in so short a run
