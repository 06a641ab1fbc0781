"""Checkpoints that hyimg runs: releases by their ids on the hub, and the ones that ship with it."""

import re
from collections.abc import Sequence

# The first of those with a name in common is the one to suggest.
RELEASES = (
    "tencent/HunyuanImage-3.0-Instruct",
    "tencent/HunyuanImage-3.0-Instruct-Distil",
    "ByteDance-Seed/BAGEL-7B-MoT",
    "Qwen/Qwen-Image-Edit-2511",
    "Qwen/Qwen-Image-Edit",
    "Qwen/Qwen-Image",
    "Qwen/Qwen-Image-Layered",
    "Qwen/Qwen-Image-2.1",
    "FireRedTeam/FireRed-Image-Edit-1.1",
    "FireRedTeam/FireRed-Image-Edit-1.0",
    "black-forest-labs/FLUX.2-klein-4B",
    "black-forest-labs/FLUX.2-klein-9B",
    "black-forest-labs/FLUX.2-klein-9b-kv",
    "black-forest-labs/FLUX.2-dev",
    "black-forest-labs/flux-3-image-klein",
    "black-forest-labs/flux-3-image-klein-base",
    "black-forest-labs/FLUX.1-Kontext-dev",
    "black-forest-labs/FLUX.1-dev",
    "black-forest-labs/FLUX.1-schnell",
    "krea/Krea-2-Turbo",
    "meituan-longcat/LongCat-Image-Edit",
    "meituan-longcat/LongCat-Image",
    "Tongyi-MAI/Z-Image-Turbo",
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    "tiny-image",
    "tiny-video",
)

# Releases whose other parts go with a transformer of an architecture.
_PARTS_FOR = {
    "Qwen-Image": (
        "Qwen/Qwen-Image-Edit-2511",
        "Qwen/Qwen-Image-Edit-2509",
        "Qwen/Qwen-Image-Edit",
        "Qwen/Qwen-Image",
        "Qwen/Qwen-Image-2512",
    ),
    "Qwen-Image-2.1": ("Qwen/Qwen-Image-2.1",),
    "FLUX.2": (
        "black-forest-labs/FLUX.2-klein-4B",
        "black-forest-labs/FLUX.2-klein-9B",
        "black-forest-labs/FLUX.2-klein-9b-kv",
    ),
    "FLUX.3": (
        "black-forest-labs/flux-3-image-klein",
        "black-forest-labs/flux-3-image-klein-base",
    ),
    "FLUX.1": ("black-forest-labs/FLUX.1-Kontext-dev",),
    "Z-Image": ("Tongyi-MAI/Z-Image-Turbo", "Tongyi-MAI/Z-Image"),
    "LongCat-Image": ("meituan-longcat/LongCat-Image-Edit", "meituan-longcat/LongCat-Image"),
}


def with_parts_for(architecture: str, file_name: str) -> tuple[str, ...]:
    """Return releases whose other parts go with a file; those that its name may mean come first."""
    known, words = _PARTS_FOR.get(architecture, ()), {*_words(file_name)}
    return tuple(sorted(known, key=lambda one: -len(words.intersection(_words(one)))))


def meant_by(name: str, most: int = 3) -> Sequence[str]:
    """Return the releases that a short name may mean, such as `qwen-image-edit` or `flux`.

    Those that have all of its words, else those that have most of them. Of several, the ones whose
    own name is shortest come first.
    """
    words = _words(name.rpartition("/")[2])
    shared = {
        release: sum(any(own.startswith(word) for own in _words(release)) for word in words)
        for release in RELEASES
    }
    best = max(shared.values())
    if not words or best * 2 <= len(words):
        return ()
    found = [release for release in RELEASES if shared[release] == best]
    exact = [one for one in found if _words(one.rpartition("/")[2]) == words]
    return (exact or sorted(found, key=lambda one: len(_words(one))))[:most]


def _words(name: str) -> list[str]:
    """Return the words and numbers of a name, in lower case."""
    return re.findall(r"[a-z]+|[0-9]+", name.lower())
