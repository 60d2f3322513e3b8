# OpenAI's gpt2 (124 M parameters) as it is, on our validation text: about 3.12 on OpenWebText.
#   python train.py config/eval_gpt2.py

init_from = "gpt2"
eval_only = True
eval_iters = 500  # x 8 sequences x 1024 tokens: 4 million tokens, enough for two decimals
batch_size = 8
wandb_log = False
