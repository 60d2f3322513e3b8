# The network of train_shakespeare_char.py, by Muon and in half its iterations.
#   python data/shakespeare_char/prepare.py
#   python train.py config/train_shakespeare_char_muon.py

out_dir = "out-shakespeare-char-muon"
eval_interval = 125
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # only a better val loss is worth keeping once it overfits

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

optimizer = "muon"
learning_rate = 3e-3  # three times AdamW's: Muon's updates are of AdamW's size, but bear more (docs/optimizers.md)
max_iters = 2500
lr_schedule = "linear"  # to nothing: the last updates are the smallest, and no tail is left to average
min_lr = 0.0
beta2 = 0.99
warmup_iters = 50
