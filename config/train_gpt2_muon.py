# GPT-2 124M on OpenWebText by Muon: train_gpt2.py's batch and data, half its updates.
#   python data/openwebtext/prepare.py
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_muon.py

out_dir = "out-gpt2-muon"
wandb_log = True
wandb_project = "owt"
wandb_run_name = "gpt2-124M-muon"

dataset = "openwebtext"

batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

optimizer = "muon"
max_iters = 300000

# The rate by scale. An update of ours moves a matrix by 0.2 · learning_rate an entry (root mean square), as AdamW's
# do, whatever its shape (Moonlight, arXiv:2502.16982), so that AdamW's 6e-4 is a safe rate and about where to begin.
# The speed runs of modded-nanogpt began with 0.02 for 124 M parameters, where a square matrix of 768 moves by
# learning_rate / √768 an entry: 3.6e-3 in our scale, for a network with normalised queries and keys, which GPT-2
# hasn't. Three times AdamW's lies between the two.
learning_rate = 1.8e-3
min_lr = 0.0
lr_schedule = "wsd"  # until the rate falls, a resumed run can still be given more max_iters
decay_frac = 0.2
warmup_iters = 2000
weight_decay = 1e-1

eval_interval = 1000
eval_iters = 200
log_interval = 10
