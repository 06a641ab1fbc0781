"""Write the embedded tiny video checkpoint, or one of another family, to a folder.

    python recipes/build-tiny-video/build.py OUT                    as hyimg_cli/assets/tiny-video
    python recipes/build-tiny-video/build.py OUT --family wan       Wan 2.1
    python recipes/build-tiny-video/build.py OUT --family wan-2.2   two transformers
    python recipes/build-tiny-video/build.py OUT --family lingbot-world
                            the published layout, with a Wan for its other parts in OUT/components
    python recipes/build-tiny-video/build.py OUT --family lingbot-world-diffusers

Weights are random, from a fixed seed: the same bytes on every machine. OUT must not exist.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tiny_checkpoints import hunyuan_video15, lingbot_world, wan

FAMILIES: dict[str, Callable[[Path], None]] = {
    "hunyuan-video-1.5": hunyuan_video15.write,
    "wan": wan.write,
    "wan-2.2": partial(wan.write, boundary_ratio=0.875),
    "lingbot-world": lingbot_world.write,
    "lingbot-world-diffusers": partial(lingbot_world.write, converted=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default=next(iter(FAMILIES)))
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists")
    FAMILIES[arguments.family](arguments.out)
    size = sum(file.stat().st_size for file in arguments.out.rglob("*") if file.is_file())
    print(f"{arguments.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
