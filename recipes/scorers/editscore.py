"""How well an edit follows its instruction and keeps the rest, by EditScore: 0 to 10.

    python -m venv venvs/editscore && venvs/editscore/bin/pip install editscore==0.2
    hyimg score out --score recipes/scorers/editscore.py:edit \
        --score-python edit=venvs/editscore/bin/python

EditScore needs a GPU. For a reply that it cannot read, the package gives a random number, and says
so in its reasoning (`guess_if_cannot_parse`): such an edit has no value here. Keep `num_pass` at 1,
because the package returns the reasoning of the last pass alone. Keep `evaluate`, because
`batch_evaluate` gives the middle of the range instead and does not say so.
"""

BASE, LORA = "Qwen/Qwen2.5-VL-7B-Instruct", "EditScore/EditScore-7B"
SCORERS = {
    "edit": {
        "version": "1",
        "weights": "EditScore/EditScore-7B on Qwen/Qwen2.5-VL-7B-Instruct",
        "licence": "Apache-2.0",
        "needs": ["prompt", "source", "result"],
        "range": [0, 10],
    }
}
_PARTS = ("prompt_following", "consistency", "perceptual_quality")
_loaded = []


def edit(cases, options):
    if not _loaded:
        from editscore import EditScore

        _loaded.append(
            EditScore(
                backbone="qwen25vl",
                model_name_or_path=BASE,
                lora_path=LORA,
                score_range=25,
                num_pass=1,
            )
        )
    return [_score(case) for case in cases]


def _score(case):
    from PIL import Image

    source = case["sources"][case["kept_source"] - 1]
    pictures = [Image.open(path).convert("RGB") for path in (source, case["result"])]
    found = _loaded[0].evaluate(pictures, case["prompt"])
    return {
        "value": float(found["overall"]),
        "parts": {name: float(found[name]) for name in _PARTS},
        "reason": "{SC_reasoning} {PQ_reasoning}".format(**found),
    }
