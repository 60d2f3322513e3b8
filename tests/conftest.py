"""What holds for every test: no hub is asked, and chance plays no part."""

import os

# Before any library reads them; child processes inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # threads gain nothing at this size, and wait for each other on a busy machine

import hypothesis  # noqa: E402

# derandomize: a red suite is red for everyone, not for whoever drew the unlucky example.
hypothesis.settings.register_profile("plain", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("plain")
