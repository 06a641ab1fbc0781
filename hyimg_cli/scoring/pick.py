"""Pick candidates: gates, each with its reason, then the mean rank over the scorers.

A pure function of results, scores, a person's choices and the rule; draws and scores nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from hyimg_cli.errors import UsageError
from hyimg_cli.scoring.candidates import Candidate, Groups
from hyimg_cli.settings.run import CandidatesConfig
from hyimg_cli.settings.values import shown

_GATE = re.compile(r"([A-Za-z0-9_-]+(?:\.[^=]+)?)=(-?[0-9]+(?:\.[0-9]+)?)")
# Faults of `outside` that are verdicts on the edit.
_VERDICTS = ("none: ", "global: ")
Values = dict[str, float]
Scores = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Rule:
    """How a line's candidates are picked.

    `least`, `most`: gates by scorer or SCORER.PART. `declared`: the known scorers, by name. The
    `choosing` scorers choose; `audit` never does.
    """

    least: Mapping[str, float]
    most: Mapping[str, float]
    keep: int
    audit: str | None
    declared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def choosing(self) -> list[str]:
        return [name for name in self.declared if name != self.audit]

    def to_json(self) -> dict[str, Any]:
        scorers = {
            name: {"identity": one["identity"]} | one["declared"]
            for name, one in self.declared.items()
        }
        gates = {"min": dict(self.least), "max": dict(self.most)}
        return gates | {"keep": self.keep, "audit": self.audit, "scorers": scorers}


def rule_of(config: CandidatesConfig, declared: Mapping[str, Mapping[str, Any]]) -> Rule:
    """Return the rule of a run's settings over scorers by name.

    Each scorer has `identity` and `declared`. Raises UsageError for a gate or an audit by an
    unknown scorer.
    """
    least, most = (_gates(one, declared) for one in (config.least, config.most))
    if config.audit is not None and config.audit not in declared:
        raise _no_scorer(config.audit, "--audit", declared)
    return Rule(least, most, config.keep, config.audit, declared)


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
    hint = f"scorers here: {', '.join(declared) or 'none; hyimg score RUN --score … adds one'}"
    return UsageError(f"no scorer is called {shown(name)}", where=where, hint=hint)


def pick(
    pool: Groups,
    finals: Mapping[str, Candidate] | None,
    scores: Scores,
    rule: Rule,
    choices: Mapping[str, Sequence[str]],
) -> list[dict[str, Any]]:
    """Return the lines of picks.jsonl, one for each line of the manifest.

    `finals`: for drafts, the pictures drawn in full, by id; None if the candidates are drawn in
    full.
    """
    return [
        _pick_of(of, candidates, finals, scores, rule, choices.get(of))
        for of, candidates in pool.items()
    ]


def _pick_of(
    of: str,
    candidates: Sequence[Candidate],
    finals: Mapping[str, Candidate] | None,
    scores: Scores,
    rule: Rule,
    choice: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the line of picks.jsonl for one line of the manifest."""
    by_name = {one.custom_id: one for one in candidates}
    entries: dict[str, dict[str, Any]] = {}
    reasons: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for name, one in by_name.items():
        values, reasons[name] = judge(one, scores, rule)
        entries[name] = {"custom_id": name, "candidate": one.number, "values": values}
        if one.content and first.setdefault(one.content, name) != name:
            reasons[name].append(f"duplicate of {first[one.content]}")
        if final := (finals or {}).get(name):
            entries[name]["final_values"], why = judge(final, scores, rule)
            reasons[name] = reasons[name] or [f"final: {reason}" for reason in why]
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
    steps = candidates[0].result.get("denoise_steps")
    return {
        "candidate_of": of,
        "picked": picked,
        "missing": [name for name in picked if finals is not None and name not in finals],
        "chosen_by": "rule" if choice is None else "person",
        "ranking": [entries[name] for name in order],
        "rejected": rejected,
        "round": max(one.round for one in candidates),
        "draft_steps": None if finals is None else steps,
        "audit": _audit(rule, picked, values_of),
        "rule": rule.to_json(),
    }


def judge(one: Candidate, scores: Scores, rule: Rule) -> tuple[Values, list[str]]:
    """Return a candidate's values by scorer and SCORER.PART, and why it is rejected, if it is."""
    values: Values = {}
    if one.result and one.result.get("status") != "done":
        return values, [f"failed: {(one.result.get('error') or {}).get('message', '')}"]
    edit = one.result.get("edit") or {}
    reasons = ["none: no edit was found"] if edit.get("kind") == "none" else []
    for name, declared in rule.declared.items():
        needs = declared["declared"].get("needs", ())
        if not one.has.issuperset(needs):
            continue
        score = scores.get(one.key(declared["identity"], needs), {"fault": "not scored yet"})
        if score.get("value") is not None:
            values[name] = score["value"]
            values |= {f"{name}.{part}": value for part, value in score["parts"].items()}
        elif name != rule.audit:
            fault = str(score["fault"])
            reasons += [fault if fault.startswith(_VERDICTS) else f"not scored: {name}: {fault}"]
    return values, [*dict.fromkeys(reasons), *_breaches(values, rule)]


def _breaches(values: Values, rule: Rule) -> Iterator[str]:
    for limits, sign, way in ((rule.least, "<", 1), (rule.most, ">", -1)):
        for name, limit in limits.items():
            if name.partition(".")[0] not in values:
                continue  # not scored, which is another reason; or without a source to compare
            if name not in values:
                yield f"not scored: {name}"
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


def _audit(rule: Rule, picked: Sequence[str], values: Mapping[str, Values]) -> dict[str, Any]:
    """Return the mean values of the scorer that never chooses: over the picked, and over all."""
    if (name := rule.audit) is None:
        return {}
    every = {one: found[name] for one, found in values.items() if name in found}
    some = [every[one] for one in picked if one in every]
    mean = {"picked": some, "all": [*every.values()]}
    return {name: {of: round(fmean(those), 4) if those else None for of, those in mean.items()}}
