"""Tiny Shakespeare in GPT-2 tokens, 302 thousand to train on: to fine-tune a pretrained model.

    python data/shakespeare/prepare.py

The text is found in the ways of data/shakespeare_char; an input.txt goes into this folder.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]  # the repository and data/, from any folder

from shakespeare_char.prepare import prepare  # noqa: E402

from configurator import UserError, command  # noqa: E402
from tokenizer import GPT2Tokenizer  # noqa: E402


@command
def main(argv):
    if argv:
        raise UserError("takes no options; a text of your own goes into input.txt beside this script")
    prepare(HERE, lambda text: GPT2Tokenizer(), "python train.py config/finetune_shakespeare.py")


if __name__ == "__main__":
    main()
