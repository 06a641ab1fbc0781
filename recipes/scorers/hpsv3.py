"""How much people would prefer a picture for its prompt, by HPSv3. Higher is better.

    python -m venv venvs/hpsv3 && venvs/hpsv3/bin/pip install hpsv3
    hyimg score out --score recipes/scorers/hpsv3.py:hpsv3 \
        --score-python hpsv3=venvs/hpsv3/bin/python

Values have no fixed range. HPSv3 needs a GPU, sees every picture at 0.2 megapixels, and does not
see the source image.
"""

SCORERS = {
    "hpsv3": {
        "version": "1",
        "weights": "MizzenAI/HPSv3",
        "licence": "MIT, Apache-2.0",
        "needs": ["prompt", "result"],
    }
}
_loaded = []


def hpsv3(cases, options):
    if not _loaded:
        from hpsv3 import HPSv3RewardInferencer

        _loaded.append(HPSv3RewardInferencer(device="cuda"))
    # By name, because versions of the package order them differently.
    rewards = _loaded[0].reward(
        image_paths=[case["result"] for case in cases], prompts=[case["prompt"] for case in cases]
    )
    # The mean; the second number is its uncertainty.
    return [float(reward[0]) for reward in rewards]
