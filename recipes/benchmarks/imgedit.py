"""ImgEdit's judge as a scorer: one call for each edit, with the templates of your own checkout.

    export HYIMG_JUDGE_URL=https://… HYIMG_JUDGE_KEY=…
    hyimg score runs/imgedit --score recipes/benchmarks/imgedit.py:imgedit --repeat 3 \
        --score-option imgedit.model=gpt-4.1-2025-04-14 \
        --score-option imgedit.prompts=@Benchmark/Basic/prompts.json \
        --score-option imgedit.list=@Benchmark/Basic/basic_edit.json

The value is the mean of the three marks, 1 to 5. A reply without exactly three marks is not a
score. The official script drops a mark such as "1/5" and takes the mean of the others; here it
counts. It also asks the judge not to give marks 2 and 3 above mark 1 and never checks; `obeys` is 1
for a reply that does so.
"""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor, as_completed

SCORERS = {
    "imgedit": {
        "version": "1",
        "needs": ["prompt", "source", "result"],
        "range": [1, 5],
        "options": {"model": "", "prompts": "", "list": "", "temperature": None},
    }
}
RENAMED = {"alter": "adjust"}
MARK = re.compile(r"\W*[A-Za-z][A-Za-z &/-]*\W*:\W*([1-5])(?:\s*/\s*5)?\W*")


class CannotScore(Exception):
    """An option is missing or wrong, for every case."""

    stops_scoring = True


def imgedit(cases, options):
    """Yield a score for each case as its reply arrives; all are asked at the same time."""
    url = os.environ.get("HYIMG_JUDGE_URL")
    if not (url and options["model"] and options["prompts"] and options["list"]):
        raise CannotScore("set HYIMG_JUDGE_URL, and the options model, prompts and list")
    prompts, edits = json.loads(options["prompts"]), json.loads(options["list"])
    with ThreadPoolExecutor(len(cases)) as pool:
        asked = {
            pool.submit(scored, case, options, prompts, edits, url): n
            for n, case in enumerate(cases)
        }
        for one in as_completed(asked):
            yield {"case": asked[one]} | one.result()


# What was asked is paid for: a reply counts even if hyimg was killed before it came.
imgedit.keeps_replies = True


def scored(case, options, prompts, edits, url):
    """Return the score of one edit, with its marks as parts."""
    from hyimg_cli.scoring.endpoint import ask, picture_part

    kind = edits.get(case["id"], {}).get("edit_type")
    template = prompts.get(kind) or prompts.get(RENAMED.get(kind))
    if template is None:
        return {"value": None, "fault": f"not in the list, or no template for {kind}"}
    content = [{"type": "text", "text": template.replace("<edit_prompt>", case["prompt"])}]
    for path in (case["sources"][case["kept_source"] - 1], case["result"]):
        with open(path, "rb") as file:
            content.append(picture_part(file.read(), os.path.basename(path)))
    request = {"model": options["model"], "messages": [{"role": "user", "content": content}]}
    if options["temperature"] is not None:
        request["temperature"] = options["temperature"]
    reply = ask(url, request, 300.0)
    digest = hashlib.sha256(options["prompts"].encode()).hexdigest()
    temperature = "default" if options["temperature"] is None else options["temperature"]
    facts = reply.facts | {"temperature": temperature, "template_sha256": digest}
    found = [MARK.fullmatch(line.strip()) for line in reply.text.splitlines()]
    marks = [int(one[1]) for one in found if one]
    if reply.fault or len(marks) != 3:
        fault = reply.fault or f"reply not readable: {len(marks)} marks from 1 to 5, not 3"
        return {"value": None, "fault": fault, "reason": reply.text[:300], "facts": facts}
    parts = {f"mark{n}": mark for n, mark in enumerate(marks, 1)}
    parts["obeys"] = int(max(marks[1:]) <= marks[0])
    return {"value": sum(marks) / 3, "parts": parts, "reason": reply.text[:300], "facts": facts}
