# GPT-2 124M on OpenWebText, to a val loss of about 2.85: some four days on one node of 8 A100 40GB.
#   python data/openwebtext/prepare.py
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

wandb_log = True  # a run of days wants to be watched from elsewhere
wandb_project = "owt"
wandb_run_name = "gpt2-124M"

dataset = "openwebtext"

# 12 sequences x 1024 tokens x 40 micro-batches = 491,520 tokens an update, GPT-3's half million.
# 40 is the total: 8 ranks do 5 micro-batches each, a single GPU does all 40, and the run is the same.
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

# 600,000 updates x 491,520 tokens = 295 billion tokens, the 9 billion of OpenWebText some 33 times.
max_iters = 600000
lr_decay_iters = 600000

learning_rate = 6e-4  # GPT-3's rate for this size (Brown et al. 2020, table 2.1)
min_lr = 6e-5
warmup_iters = 2000
weight_decay = 1e-1

eval_interval = 1000
eval_iters = 200
log_interval = 10
