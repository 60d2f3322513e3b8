# A character GPT on Shakespeare for a machine without a GPU: 0.5 M parameters, about three minutes on two cores.
#   python data/shakespeare_char/prepare.py
#   python train.py config/train_shakespeare_char_cpu.py

out_dir = "out-shakespeare-char-cpu"
eval_interval = 900
eval_iters = 0  # the whole validation set, a few seconds
log_interval = 100

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 8
block_size = 128  # twice the context is worth more than a wider network

n_layer = 4
n_head = 3
n_embd = 96
dropout = 0.0  # it sees the text not quite twice: little to overfit with yet

optimizer = "muon"  # takes a third more time an iteration here, and needs far fewer of them
learning_rate = 1e-2
max_iters = 1800
lr_schedule = "linear"
min_lr = 0.0
beta2 = 0.99
warmup_iters = 50

device = "cpu"
compile = False  # compiling takes longer than it would save in so short a run
