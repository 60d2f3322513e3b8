# A character GPT on Shakespeare: 10.7 M parameters, minutes on one GPU.
#   python data/shakespeare_char/prepare.py
#   python train.py config/train_shakespeare_char.py

out_dir = "out-shakespeare-char"
eval_interval = 250  # often: a million characters are soon learnt by heart, and val tells when
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # only a better val loss is worth keeping once it overfits

wandb_log = False
wandb_project = "shakespeare-char"
wandb_run_name = "mini-gpt"

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256  # characters of context

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2  # the 5000 steps see the text about 80 times over

learning_rate = 1e-3  # a small model bears a larger rate than GPT-2's 6e-4
max_iters = 5000
lr_decay_iters = 5000  # the cosine ends with the run
min_lr = 1e-4  # a tenth of the peak
beta2 = 0.99  # 16 thousand tokens a step are few: average the squared gradient over more of them
warmup_iters = 100
