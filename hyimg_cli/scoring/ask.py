"""Ask the model that drew a picture about it: a scorer that needs no other model.

    ask[:QUESTION]     the model sees the result; the value is its probability of yes, of yes and no
    ask2:QUESTION      it sees the source pictures first, then the result
    @FILE as QUESTION  a question per line; the value is the lowest

A question may have {prompt} and {expect}, the line's `metadata.expect`. The model marks its own
work: it is asked about the written file, by an `i2t` job like any other.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from hyimg_cli.engine.run import AnySession, session_for
from hyimg_cli.engine.runner import accept, make_plan
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.models import registry
from hyimg_cli.scoring.process import Score
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import JobEnded, Outcome

if TYPE_CHECKING:
    from hyimg_cli.engine.session import Session
    from hyimg_cli.scoring.scorers import Scorer

# Source: VQAScore, arXiv 2404.01291, with its request for one of two words.
_SHOWS = 'Does this picture show "{}"? Please answer yes or no.'
_CHOICES = ("yes", "no")
_NO_DESCRIPTION = (
    "the prompt of an edit does not describe the result: give a question, or expect in its metadata"
)


class Questions:
    """Asks drawing models, in a session that it may take over from a run.

    The session stays open until `close`, so its model is loaded once.
    """

    def __init__(self, config: RunConfig) -> None:
        quiet = replace(config.batch, prewarm=False)
        self._config = replace(config, batch=quiet)
        self._session: Session | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the model."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def session_for(self, config: RunConfig) -> AnySession:
        """Return a run's session; one in this process stays open when the run closes it."""
        self.close()
        if config.parallel.has_replicas:
            return session_for(config)
        session = self._own(config)
        kept: Any = _Kept(session)
        found: AnySession = kept
        return found

    def asker(self, scorer: "Scorer") -> "Asker":
        """Return what scores candidates by a scorer's questions."""
        return Asker(self, scorer)

    def answer(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Outcome]:
        """Return the outcome of each line, by custom_id; a faulty line has a failed one."""
        # Settings of the pictures, such as a system prompt, are not the questions'.
        settings = settle({"skip_invalid": True, "revision": self._config.model.revision}, {}, {})
        data = "\n".join(map(json.dumps, lines)).encode()
        jobs, invalid = accept(manifest_of(data, "questions"), settings)
        found = {one.custom_id: one for one in invalid}
        if jobs:
            session = self._session or self._own(self._config)
            for event in session.run(make_plan(jobs)):
                if isinstance(event, JobEnded):
                    found[event.outcome.custom_id] = event.outcome
        return found

    def _own(self, config: RunConfig) -> "Session":
        from hyimg_cli.engine.session import Session  # imports torch

        self._session = Session(config)
        return self._session


class _Kept:
    """A session that its run does not close."""

    def __init__(self, session: "Session") -> None:
        self.run, self.request_stop = session.run, session.request_stop

    def close(self) -> None:
        """Leave the model loaded."""


class Asker:
    """Scores candidates by their model's answers; has the interface of `ScorerProcess`."""

    def __init__(self, questions: Questions, scorer: "Scorer") -> None:
        self._questions, self._scorer = questions, scorer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the model to the next scorer that asks it."""

    def score(
        self, cases: Mapping[str, Mapping[str, Any]], _: object = None
    ) -> Iterator[dict[str, Score]]:
        """Yield the scores of cases by their keys; all questions are asked together."""
        began = time.monotonic()
        texts = {key: _questions_about(self._scorer, case) for key, case in cases.items()}
        lines = [
            line
            for key, asked in texts.items()
            for line in _lines_of(self._scorer, cases[key], asked, key)
        ]
        ends = self._questions.answer(lines) if lines else {}
        seconds = round((time.monotonic() - began) / len(cases), 3)
        for key, asked in texts.items():
            if not isinstance(asked, Score):
                asked = _least([ends[f"{key}-{n}"] for n in range(len(asked))], asked)
            yield {key: replace(asked, seconds=seconds)}


def _questions_about(scorer: "Scorer", case: Mapping[str, Any]) -> Sequence[str] | Score:
    """Return the questions about a case, or a score without a value that says why not."""
    if case["model"] == registry.EMBEDDED:
        return Score(fault=f"{registry.EMBEDDED} was not taught to answer questions")
    expect = case["expect"] or ""
    if given := scorer.options["questions"]:
        return [
            one.replace("{prompt}", case["prompt"]).replace("{expect}", expect) for one in given
        ]
    if not expect and case["sources"]:
        return Score(fault=_NO_DESCRIPTION)
    return [_SHOWS.format(expect or case["prompt"])]


def _lines_of(
    scorer: "Scorer", case: Mapping[str, Any], asked: Sequence[str] | Score, key: str
) -> Iterator[dict[str, Any]]:
    if isinstance(asked, Score):
        return
    images = [*(case["sources"] if scorer.function == "ask2" else ()), case["result"]]
    for n, question in enumerate(asked):
        yield {
            "custom_id": f"{key}-{n}",
            "task": "i2t",
            "images": images,
            "prompt": question,
            "choices": [*_CHOICES],
            "model": case["model"],
        }


def _least(ends: Sequence[Outcome], asked: Sequence[str]) -> Score:
    """Return the lowest probability of yes; no value if one question has no answer."""
    scores = list[tuple[float, Score]]()
    for end, question in zip(ends, asked, strict=True):
        if end.error is not None:
            return Score(fault=f"{end.error.code}: {end.error.message}")
        if not end.choices:
            return Score(fault=f"the model does not answer with yes or no (mass {end.mass:.3g})")
        yes, no = (end.choices[one] for one in _CHOICES)
        parts = {"no": no, "mass": float(end.mass or 0.0)}
        reason = question if len(asked) > 1 else ""
        scores.append((yes, Score(yes, parts, reason, None)))
    return min(scores, key=lambda one: one[0])[1]
