# OpenAI's gpt2-medium (355 M parameters) as it is, on our validation text: about 2.84 on OpenWebText.
#   python train.py config/eval_gpt2_medium.py

init_from = "gpt2-medium"
eval_only = True
eval_iters = 500  # x 8 sequences x 1024 tokens: 4 million tokens, enough for two decimals
batch_size = 8
wandb_log = False
