"""Pick candidates: gates, each with its reason, then the mean rank over the scorers.

A pure function of results, scores, a person's choices and the rule; draws and scores nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from hyimg_cli.errors import UsageError
from hyimg_cli.journal.candidates import Candidate, Scores, Values, scores_of, values_in
from hyimg_cli.scoring.candidates import Groups, all_in
from hyimg_cli.settings.run import CandidatesConfig
from hyimg_cli.settings.values import nearest, shown

_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_GATE = re.compile(rf"([A-Za-z0-9_-]+(?:\.[^=]+)?)=({_NUMBER})")
# Faults of `outside` that are verdicts on the edit.
_VERDICTS = ("none: ", "global: ")
_NOT_YET = {"fault": "not scored yet"}
# What a candidate lacks that a scorer needs, by the words of `scorers.NEEDS`.
_LACKING = {
    "source": "no source picture",
    "mask": "no mask of its edit",
    "result": "no picture",
    "text": "no text",
    "model": "no picture",
    "expect": "no expect in its metadata",
    "confidence": "its text was not written by a model",
}


@dataclass(frozen=True)
class Rule:
    """How a line's candidates are picked.

    `least`, `most`: gates by scorer or SCORER.PART. `declared`: the scorers that count, by name.
    `by`: the ones that rank; empty for all. `left_out`: scorers that have no value in the run, so
    that they do not count.
    """

    least: Mapping[str, float]
    most: Mapping[str, float]
    keep: int
    declared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    by: Sequence[str] = ()
    left_out: Sequence[str] = ()

    @property
    def choosing(self) -> list[str]:
        return [name for name in self.declared if not self.by or name in self.by]

    @property
    def gated(self) -> set[str]:
        """The scorers that a gate names."""
        return {name.partition(".")[0] for name in (*self.least, *self.most)}

    def to_json(self) -> dict[str, Any]:
        scorers = {
            name: {"identity": one["identity"]} | one["declared"]
            for name, one in self.declared.items()
        }
        gates = {"min": dict(self.least), "max": dict(self.most)}
        told = {"by": [*self.by], "left_out": [*self.left_out]}
        return (
            gates | {"keep": self.keep, "scorers": scorers} | {n: v for n, v in told.items() if v}
        )


def rule_of(
    config: CandidatesConfig, declared: Mapping[str, Mapping[str, Any]], by: Sequence[str] = ()
) -> Rule:
    """Return the rule of a run's settings over scorers by name.

    Each scorer has `identity` and `declared`. `by`: the scorers that rank; empty for all. Raises
    UsageError for a gate or a name without a scorer.
    """
    least, most = (_gates(one, declared) for one in (config.least, config.most))
    for name in by:
        if name not in declared:
            raise _no_scorer(name, "--by", declared)
    rule = Rule(least, most, config.keep, declared, by)
    if by:  # scorers that neither rank nor have a gate do not count
        counted = {*by, *rule.gated}
        rule = replace(rule, declared={n: one for n, one in declared.items() if n in counted})
    return rule


def _gates(texts: Sequence[str], declared: Mapping[str, Any]) -> dict[str, float]:
    gates = {}
    for text in texts:
        if (found := _GATE.fullmatch(text)) is None:
            hint = "write SCORER=NUMBER or SCORER.PART=NUMBER, for example judge.follows=7"
            raise UsageError(f"{shown(text)} is not a gate", hint=hint, code="usage.gate")
        if (scorer := found[1].partition(".")[0]) not in declared:
            raise _no_scorer(scorer, text, declared)
        gates[found[1]] = float(found[2])
    return gates


def _no_scorer(name: str, where: str, declared: Mapping[str, Any]) -> UsageError:
    close = nearest(name, declared)
    guess = f"did you mean {close}? " if close else ""
    hint = (
        f"{guess}scorers here: {', '.join(declared) or 'none; hyimg score RUN --score … adds one'}"
    )
    return UsageError(f"no scorer is called {shown(name)}", where=where, hint=hint)


@dataclass(frozen=True)
class Scored:
    """A candidate with its score by each scorer that could be shown it."""

    candidate: Candidate
    scores: Mapping[str, Mapping[str, Any]]

    @property
    def is_edit(self) -> bool:
        return bool(self.candidate.line.get("images"))


def _scored(one: Candidate, scores: Scores, rule: Rule) -> Scored:
    found = scores_of(one, scores, rule.declared)
    return Scored(
        one, {name: _NOT_YET if score is None else score for name, score in found.items()}
    )


def _is_judgement(score: Mapping[str, Any]) -> bool:
    """Return True for a value, and for a verdict on the edit."""
    return score.get("value") is not None or str(score.get("fault")).startswith(_VERDICTS)


def pick(
    pool: Groups,
    finals: Mapping[str, Candidate] | None,
    scores: Scores,
    rule: Rule,
    choices: Mapping[str, Sequence[str]],
) -> list[dict[str, Any]]:
    """Return the lines of picks.jsonl, one for each line of the manifest.

    `finals`: for drafts, the pictures drawn in full, by id; None if the candidates are drawn in
    full. A scorer without any value, such as one that always failed, does not count if another has
    values, unless a gate names it.
    """
    scored = {of: [_scored(one, scores, rule) for one in some] for of, some in pool.items()}
    full = {name: _scored(one, scores, rule) for name, one in (finals or {}).items()}
    judged = {
        name
        for one in (*all_in(scored), *full.values())
        for name, score in one.scores.items()
        if _is_judgement(score)
    }
    counted = judged | rule.gated if judged else {*rule.declared}
    rule = replace(
        rule,
        declared={name: one for name, one in rule.declared.items() if name in counted},
        left_out=[name for name in rule.declared if name not in counted],
    )
    return [
        _pick_of(of, candidates, None if finals is None else full, rule, judged, choices.get(of))
        for of, candidates in scored.items()
    ]


def _pick_of(
    of: str,
    candidates: Sequence[Scored],
    finals: Mapping[str, Scored] | None,
    rule: Rule,
    judged: set[str],
    choice: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the line of picks.jsonl for one line of the manifest."""
    by_name = {one.candidate.custom_id: one.candidate for one in candidates}
    entries: dict[str, dict[str, Any]] = {}
    reasons: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for scored in candidates:
        one, name = scored.candidate, scored.candidate.custom_id
        values, reasons[name] = judge(scored, rule, judged)
        entries[name] = {"custom_id": name, "candidate": one.number, "values": values}
        if one.content and first.setdefault(one.content, name) != name:
            reasons[name].append(f"duplicate of {first[one.content]}")
        if final := (finals or {}).get(name):
            entries[name]["final_values"], why = judge(final, rule, judged)
            reasons[name] = reasons[name] or [f"final: {reason}" for reason in why]
        unjudged = sorted(rule.gated - scored.scores.keys())
        if unjudged and not reasons[name]:
            entries[name]["not_judged_by"] = unjudged
    values_of = {name: entry["values"] for name, entry in entries.items()}
    eligible = [name for name in by_name if not reasons[name]]
    mean_ranks = _mean_ranks(eligible, values_of, rule)
    order = sorted(eligible, key=lambda name: (mean_ranks[name] or 0, by_name[name].number))
    picked = order[: rule.keep]
    # A person's choice overrides the gates and the order.
    if choice is not None:
        picked = [
            name for name in dict.fromkeys(choice) if name in by_name and by_name[name].content
        ]
        order = picked + [name for name in order if name not in picked]
    for rank, name in enumerate(order, 1):
        entries[name] |= {"rank": rank, "mean_rank": mean_ranks.get(name)}
        entries[name] |= {"overruled": reasons[name]} if reasons[name] else {}
    rejected = [entries[name] | {"reasons": reasons[name]} for name in by_name if name not in order]
    # The draft's own, not those of its last attempt, which may have continued an earlier one.
    steps = candidates[0].candidate.line.get("num_inference_steps")
    return {
        "candidate_of": of,
        "picked": picked,
        "missing": [name for name in picked if finals is not None and name not in finals],
        "chosen_by": "rule" if choice is None else "person",
        "ranking": [entries[name] for name in order],
        "rejected": rejected,
        "draft_steps": None if finals is None else steps,
        "rule": rule.to_json(),
    }


def judge(scored: Scored, rule: Rule, judged: set[str]) -> tuple[Values, list[str]]:
    """Return a candidate's values by scorer and SCORER.PART, and why it is rejected, if it is.

    `judged`: the scorers with a judgement on any candidate of the run.
    """
    values: Values = {}
    result = scored.candidate.result
    if result and result.get("status") != "done":
        return values, [f"failed: {(result.get('error') or {}).get('message', '')}"]
    edit = result.get("edit") or {}
    reasons = ["none: no edit was found"] if edit.get("kind") == "none" else []
    for name in rule.declared:
        if (score := scored.scores.get(name)) is None:
            continue
        if own := values_in(name, score):
            values |= own
        else:
            fault = str(score["fault"])
            reasons.append(
                fault if fault.startswith(_VERDICTS) else f"not scored by {name}: {fault}"
            )
    breaches = [*_unjudged(scored, rule, judged), *_breaches(values, rule)]
    return values, [*dict.fromkeys(reasons), *breaches]


def _unjudged(scored: Scored, rule: Rule, judged: set[str]) -> Iterator[str]:
    """Yield why gates do not pass a candidate that their scorers cannot be shown.

    Only a gate on edits (its scorer needs a source or a mask) passes a picture without a source,
    and only if it judged an edit of this run.
    """
    for name in sorted(rule.gated - scored.scores.keys()):
        needs = rule.declared[name]["declared"].get("needs", ())
        if not scored.is_edit and name in judged and {"source", "mask"}.intersection(needs):
            continue
        lacking = [_LACKING[need] for need in needs if need not in scored.candidate.has]
        yield f"not scored by {name}: {' and '.join(lacking)}"


def _breaches(values: Values, rule: Rule) -> Iterator[str]:
    for limits, sign, way in ((rule.least, "<", 1), (rule.most, ">", -1)):
        for name, limit in limits.items():
            scorer, _, part = name.partition(".")
            if scorer not in values:
                continue  # not scored, which is another reason
            if name not in values:
                yield f"not scored by {scorer}: no part is called {part}"
            elif values[name] * way < limit * way:
                yield f"{name} {values[name]:g} {sign} {limit:g}"


def _mean_ranks(
    names: Sequence[str], values: Mapping[str, Values], rule: Rule
) -> dict[str, float | None]:
    """Return each candidate's mean rank; None if no scorer has a value for it.

    For each scorer, 1 is the best, and equal values share a rank; the mean is over the scorers with
    a value.
    """
    ranks: dict[str, list[float]] = {name: [] for name in names}
    for name in rule.choosing:
        sign = -1 if rule.declared[name]["declared"].get("higher_is_better", True) else 1
        own = {one: sign * found[name] for one in ranks if name in (found := values[one])}
        for one, value in own.items():
            better, equal = (sum(map(test, own.values())) for test in (value.__gt__, value.__eq__))
            ranks[one].append(better + (equal + 1) / 2)
    return {one: round(fmean(some), 4) if some else None for one, some in ranks.items()}
