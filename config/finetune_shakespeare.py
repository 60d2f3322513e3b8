# OpenAI's largest GPT-2 learns to speak Shakespeare. 1.56 G parameters x 16 bytes (weight, gradient, two
# moments) are 25 GB of GPU memory before the activations.
#   python data/shakespeare/prepare.py
#   python train.py config/finetune_shakespeare.py
# A smaller GPU: add --init_from=gpt2-medium (or gpt2).

out_dir = "out-shakespeare"
init_from = "gpt2-xl"
eval_interval = 5  # the whole run is 20 updates, and the best is among the first
eval_iters = 40
always_save_checkpoint = False  # keep the best on val: a big model overfits so small a text at once

wandb_log = False
wandb_project = "shakespeare"
wandb_run_name = "ft-gpt2-xl"

dataset = "shakespeare"

# 1 sequence x 1024 tokens x 32 micro-batches = 32,768 tokens an update; the training text has 301,966,
# so 20 updates are a little over two epochs.
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20

# Small and constant: the weights are good already, and a schedule has nothing to shape in 20 updates.
learning_rate = 3e-5
decay_lr = False
