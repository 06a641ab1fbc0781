"""Writes the embedded tiny video checkpoint, or a tiny Wan one, into a folder.

    python recipes/build-tiny-video/build.py OUT                    as hyimg_cli/assets/tiny-video
    python recipes/build-tiny-video/build.py OUT --family wan       Wan 2.1
    python recipes/build-tiny-video/build.py OUT --family wan-2.2   two transformers

Weights are random, from a fixed seed: the same bytes on every machine. OUT must not exist.
"""

import argparse
from pathlib import Path

from tiny_checkpoints import hunyuan_video15, wan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--family", choices=("hunyuan-video-1.5", "wan", "wan-2.2"), default="hunyuan-video-1.5"
    )
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists")
    if arguments.family == "hunyuan-video-1.5":
        hunyuan_video15.write(arguments.out)
    else:
        wan.write(arguments.out, boundary_ratio=0.875 if arguments.family == "wan-2.2" else None)
    size = sum(file.stat().st_size for file in arguments.out.rglob("*") if file.is_file())
    print(f"{arguments.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
