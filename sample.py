"""Print text from a model: one of yours, OpenAI's, or any Hugging Face GPT-2 in a folder.

python sample.py --out_dir=out-shakespeare-char --start="To be" --num_samples=1
python sample.py --init_from=gpt2-xl --start=FILE:prompt.txt --temperature=0.8 --top_p=0.95
"""

import codecs
import sys
from dataclasses import dataclass
from typing import Literal

import torch

import checkpoint
import configurator
from configurator import UserError
from inference import ready
from runtime import Runtime, RuntimeConfig
from tokenizer import from_description


@dataclass
class SampleConfig(RuntimeConfig):
    init_from: str = "resume"  # resume: the checkpoint in out_dir; else gpt2 … gpt2-xl, a folder or a checkpoint file
    out_dir: str = "out"  # where train.py saved; best.pt is taken before ckpt.pt
    start: str = "\n"  # the prompt, or FILE:path of a text file that holds it; may be empty
    num_samples: int = 10  # drawn together, in one batch
    max_new_tokens: int = 500  # in each sample
    temperature: float = 0.8  # 1 is the model as it is, less is safer, 0 always takes the likeliest token
    top_k: int = 200  # draw from the k likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the fewest tokens that have at least this much probability together
    quantize: Literal["none", "int8"] = "none"  # int8: matrices in 8 bits, on a CPU; logits move by about 2 %
    stop: str = ""  # end a sample where this text appears

    def check(self):
        super().check()
        for name in ("num_samples", "max_new_tokens"):
            if not 1 <= getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be at least 1 and below 1e6, not {getattr(self, name)}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number from 0 on, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, but is {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")


class TextStream:
    """Token ids of one sample → its text, bit by bit: never half a character, nothing from `stop` on."""

    def __init__(self, tokenizer, stop):
        self.tokenizer, self.stop, self.done = tokenizer, stop, False
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""  # text that may turn out to be the beginning of `stop`

    def add(self, token):
        """The text that is certain after one more token id."""
        if token == self.tokenizer.end_of_text:
            return self.finish()
        self.held += self.decoder.decode(self.tokenizer.decode_bytes([token]))
        if self.stop and self.stop in self.held:
            self.held, self.done = self.held[: self.held.index(self.stop)], True
        overlaps = (n for n in range(len(self.stop) - 1, 0, -1) if self.held.endswith(self.stop[:n]))
        keep = 0 if self.done else next(overlaps, 0)
        certain, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return certain

    def finish(self):
        """The text still held back, once no more ids come."""
        self.done = True
        rest, self.held = self.held + self.decoder.decode(b"", final=True), ""
        return rest


def read_prompt(start):
    if not start.startswith("FILE:"):
        return start
    path = start.removeprefix("FILE:")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--start={start}: {error}") from None


def prompt_ids(tokenizer, text):
    """The prompt's ids; an empty one becomes what documents begin after: end-of-text, a newline, or else the id 0."""
    if text:
        return tokenizer.encode(text, allow_special=True)
    if tokenizer.end_of_text is not None:
        return [tokenizer.end_of_text]
    try:
        return tokenizer.encode("\n")
    except UserError:
        return [0]


@configurator.command
def main(argv):
    cfg = configurator.parse(SampleConfig, argv)
    source = cfg.out_dir if cfg.init_from == "resume" else cfg.init_from
    model, description, origin = checkpoint.pretrained(source)
    if description is None:
        raise UserError(f"{origin} doesn't say which tokenizer its {model.config.vocab_size} ids belong to")
    tokenizer = from_description(description)
    text = read_prompt(cfg.start)
    ids = prompt_ids(tokenizer, text)
    rt = Runtime(cfg)
    print(f"{model.num_params():,} parameters of {origin} on {rt}", file=sys.stderr)
    ready(model, rt, cfg.num_samples, cfg.quantize)

    prompt = torch.tensor([ids] * cfg.num_samples, device=rt.device)  # (num_samples, t)
    samples = [TextStream(tokenizer, cfg.stop) for _ in range(cfg.num_samples)]
    texts = [text] * cfg.num_samples
    alone = cfg.num_samples == 1
    if alone:
        print(text, end="", flush=True)
    with rt.autocast():
        for tokens in model.stream(
            prompt, cfg.max_new_tokens, temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p,
            n_vocab=min(tokenizer.vocab_size, model.config.vocab_size),
        ):  # fmt: skip
            for i, token in enumerate(tokens.tolist()):
                if not samples[i].done:
                    piece = samples[i].add(token)
                    texts[i] += piece
                    if alone:
                        print(piece, end="", flush=True)
            if all(sample.done for sample in samples):
                break
    for i, sample in enumerate(samples):
        rest = sample.finish()
        print(rest if alone else texts[i] + rest, "---------------", sep="\n")
    rt.close()


if __name__ == "__main__":
    main()
