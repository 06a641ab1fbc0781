"""VIEScore as a scorer: two calls for each edit, with the template of your own checkout.

    export HYIMG_JUDGE_URL=https://… HYIMG_JUDGE_KEY=…
    hyimg score runs/gedit --score recipes/benchmarks/viescore.py:viescore --repeat 3 \
        --score-option viescore.model=gpt-4.1-2025-04-14 \
        --score-option viescore.template=@VIEScore/viescore/vie_prompts.py

The first call shows source and result and asks how well the instruction was followed, and how
little else changed (SC). The second shows the result alone and asks how natural it is, and how free
of artefacts (PQ). Each is the lower of its two marks; the value is the root of their product, for
each edit. The template's texts are read as literals; the file is not run, and its digest is part of
the scorer's identity. A reply without two marks from 0 to 10 is not a score, and is not guessed.
"""

import ast
import hashlib
import io
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor, as_completed

SCORERS = {
    "viescore": {
        "version": "1",
        "needs": ["prompt", "source", "result"],
        "range": [0, 10],
        "options": {
            "model": "",
            "template": "",
            # null: not sent, so the endpoint's own default counts.
            "temperature": None,
            "max_tokens": 1400,
            # official: the result is resized to its source, and both are JPEG. files: as they are.
            "prepare": "official",
        },
    }
}
CONTEXT = "_context_no_delimit"
SC_RULES = (CONTEXT, "_prompts_0shot_two_image_edit_rule", "_prompts_0shot_tie_rule_SC")
PQ_RULES = (CONTEXT, "_prompts_0shot_rule_PQ")
PREPARED = ("official", "files")


class CannotScore(Exception):
    """An option is missing or wrong, for every case."""

    stops_scoring = True


def viescore(cases, options):
    """Yield a score for each case as its replies arrive; all are asked at the same time."""
    url = os.environ.get("HYIMG_JUDGE_URL")
    if not url or not options["model"]:
        raise CannotScore("set HYIMG_JUDGE_URL, and --score-option viescore.model=MODEL")
    if options["prepare"] not in PREPARED:
        raise CannotScore(f"viescore.prepare is one of {', '.join(PREPARED)}")
    texts = texts_of(options["template"])
    with ThreadPoolExecutor(len(cases)) as pool:
        asked = {pool.submit(scored, case, options, texts, url): n for n, case in enumerate(cases)}
        for one in as_completed(asked):
            yield {"case": asked[one]} | one.result()


# What was asked is paid for: a reply counts even if hyimg was killed before it came.
viescore.keeps_replies = True


def texts_of(template):
    """Return the two prompts in the source of vie_prompts.py."""
    if not template:
        raise CannotScore("--score-option viescore.template=@PATH/vie_prompts.py is needed")
    found = {}
    for node in ast.parse(template).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found[ast.unparse(node.targets[0])] = node.value.value
    if missing := [name for name in (*SC_RULES, *PQ_RULES) if name not in found]:
        raise CannotScore(f"the template has no {missing[0]}: is it VIEScore's vie_prompts.py?")
    return ["\n".join(found[name] for name in names) for names in (SC_RULES, PQ_RULES)]


def scored(case, options, texts, url):
    """Return the score of one edit, with its marks as parts."""
    from hyimg_cli.scoring.endpoint import ask, picture_part

    pictures = [picture_part(data) for data in prepared(case, options["prepare"])]
    prompts = (
        (texts[0].replace("<instruction>", case["prompt"]), pictures),
        (texts[1], pictures[1:]),
    )
    parts, reasons, facts = {}, [], {}
    for name, (text, shown) in zip(("SC", "PQ"), prompts, strict=True):
        content = [{"type": "text", "text": text}, *shown]
        request = {"model": options["model"], "messages": [{"role": "user", "content": content}]}
        request |= {"max_tokens": options["max_tokens"]}
        if options["temperature"] is not None:
            request["temperature"] = options["temperature"]
        # Two calls in a batch's time of 300 s.
        reply = ask(url, request, 150.0)
        facts |= reply.facts
        marks, reason = marks_in(reply.text) if not reply.fault else (None, "")
        if marks is None:
            fault = reply.fault or "reply not readable: no two marks from 0 to 10"
            fault, reason = f"{fault} ({name})", reply.text[:300]
            return {"value": None, "fault": fault, "reason": reason, "facts": told(facts, options)}
        parts |= {name: min(marks), f"{name}1": marks[0], f"{name}2": marks[1]}
        reasons.append(reason)
    value = math.sqrt(parts["SC"] * parts["PQ"])
    score = {"value": value, "parts": parts, "reason": " | ".join(reasons)}
    return score | {"facts": told(facts, options)}


def told(facts, options):
    digest = hashlib.sha256(options["template"].encode()).hexdigest()
    temperature = "default" if options["temperature"] is None else options["temperature"]
    return facts | {"temperature": temperature, "template_sha256": digest}


def marks_in(text):
    """Return the two marks in a reply and its reasoning; None for any other reply.

    A reply is an object with `score`, or the list of marks alone.
    """
    for start, end in (("{", "}"), ("[", "]")):
        if start not in text or end not in text:
            continue
        try:
            found = json.loads(text[text.index(start) : text.rindex(end) + 1], strict=False)
        except ValueError:
            return None, ""
        marks = found.get("score") if isinstance(found, dict) else found
        is_pair = isinstance(marks, list) and len(marks) == 2
        if is_pair and all(type(n) in (int, float) and 0 <= n <= 10 for n in marks):
            reason = found.get("reasoning") if isinstance(found, dict) else ""
            return marks, str(reason or "")
        return None, ""
    return None, ""


def prepared(case, rule):
    """Return the files of source and result as the judge sees them."""
    paths = (case["sources"][case["kept_source"] - 1], case["result"])
    if rule == "files":
        return [read(path) for path in paths]
    from PIL import Image

    source, result = (Image.open(path).convert("RGB") for path in paths)
    return [jpeg(source), jpeg(result.resize(source.size))]


def read(path):
    with open(path, "rb") as file:
        return file.read()


def jpeg(image):
    data = io.BytesIO()
    image.save(data, format="JPEG")
    return data.getvalue()
