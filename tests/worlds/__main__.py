"""``python -m tests.worlds MODE FAMILY SEED ANSWERS``: worlds beside neighbours, until so many answers."""

import sys
import tempfile
from contextlib import closing
from pathlib import Path

from tests.worlds.worlds import WorldPlay, played


def main(mode: str, family: str, seed: str, answers: str) -> int:
    with tempfile.TemporaryDirectory() as directory, closing(
            WorldPlay(mode, family, Path(directory))) as play:
        found = played(play, f"{mode} {family} {seed}", int(answers))
    print(*found.wrong, sep="\n\n")
    for text, number in found.counts.most_common(20):
        print(number, text)
    return bool(found.wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
