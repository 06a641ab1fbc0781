"""How well a picture matches its prompt: cosine similarity by CLIP, higher is better.

    python -m venv venvs/clip && venvs/clip/bin/pip install open_clip_torch
    hyimg score out --score recipes/scorers/clip.py:clip --score-python clip=venvs/clip/bin/python

CLIP does not see the source image. An edit's prompt says what to change, not what the result shows:
give this scorer prompts that describe pictures.
"""

MODEL, WEIGHTS = "ViT-B-32", "laion2b_s34b_b79k"
SCORERS = {
    "clip": {
        "version": "1",
        "weights": "ViT-B-32 laion2b_s34b_b79k",
        "licence": "MIT",
        "needs": ["prompt", "result"],
        "range": [-1, 1],
    }
}
_loaded = []


def clip(cases, options):
    import torch
    from PIL import Image

    model, preprocess, tokenize = _load()
    pictures = [preprocess(Image.open(case["result"]).convert("RGB")) for case in cases]
    with torch.no_grad():
        images = model.encode_image(torch.stack(pictures))
        texts = model.encode_text(tokenize([case["prompt"] for case in cases]))
    return torch.nn.functional.cosine_similarity(images, texts).tolist()


def _load():
    """Return the model, loaded once."""
    if not _loaded:
        import open_clip

        model, _, preprocess = open_clip.create_model_and_transforms(MODEL, pretrained=WEIGHTS)
        _loaded.extend((model.eval(), preprocess, open_clip.get_tokenizer(MODEL)))
    return _loaded
