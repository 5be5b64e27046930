"""``python -m tests.worlds MODE FAMILY SEED ANSWERS``: worlds beside neighbours, until so many answers."""

import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random

from tests.conformance.any_services import World
from tests.worlds.worlds import WorldPlay


def main(mode: str, family: str, seed: str, answers: str) -> int:
    random = Random(f"{mode} {family} {seed}")
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory, closing(
            WorldPlay(mode, family, Path(directory))) as play:
        world = World(random)
        while counts["right"] + counts["wrong"] < int(answers):
            play.apply(world)
            attempts = list(world.attempts())
            if not attempts:
                continue
            shown, settings = play.neighboured(random)
            try:
                found = play.verdicts(attempts)
                play.alone()
            except BaseException:
                print("\n".join(shown), settings, flush=True)
                raise
            counts += found.counts
            if found.wrong:
                print("\n".join(shown), settings)
                print(*found.wrong[:4], sep="\n")
                print("---", flush=True)
    for text, number in counts.most_common(25):
        print(number, text)
    return bool(counts["wrong"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
