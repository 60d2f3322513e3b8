# OpenAI's gpt2-large (774 M parameters) as it is, on our validation text: about 2.67 on OpenWebText.
#   python train.py config/eval_gpt2_large.py

init_from = "gpt2-large"
eval_only = True
eval_iters = 500  # x 8 sequences x 1024 tokens: 4 million tokens, enough for two decimals
batch_size = 8
wandb_log = False
