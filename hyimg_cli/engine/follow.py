"""Run jobs as they come: each round is a run of all that is known, whose finished jobs are skipped.

The model stays loaded between rounds. A job is drawn as in one run of all: what it is given decides
its pixels, and not when it came.
"""

import time
from collections.abc import Generator
from dataclasses import replace
from typing import Protocol, cast

from hyimg_cli.engine.run import AnySession, ManifestEvent, ManifestRun, OnEvent, session_for
from hyimg_cli.engine.runner import RunRequest, Summary
from hyimg_cli.errors import RunHalted, UsageError
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.settings.kinds import seconds_in
from hyimg_cli.settings.run import FailurePolicy, RunConfig
from hyimg_cli.spec.events import Event, JobEnded, Remark
from hyimg_cli.spec.plan import Plan

# What one round may lack and a later one may have: it is told, and does not end the run.
_MAY_COME = ("source.none",)


class Arrivals(Protocol):
    """Where jobs come from."""

    # True if nothing more will come.
    is_over: bool

    def take(self) -> RunRequest | None:
        """Return a run of all jobs so far if more have come, after a short wait; None if not."""
        ...


class FollowedRuns:
    """Runs jobs as they come, until no more can come, or until its time is up."""

    def __init__(self, arrivals: Arrivals, on_event: OnEvent, *, limit: str | None = None) -> None:
        """`limit`: the time limit of the whole, by the words of a setting."""
        self._arrivals, self._on_event = arrivals, on_event
        self._began = time.monotonic()
        self._ends_at = None if limit is None else self._began + seconds_in(limit)
        self._session: _KeptSession | None = None
        self._at_work: ManifestRun | None = None
        self._rounds = self._failed = 0
        # The messages of failed jobs, as a faulty line is found in every round.
        self._told: dict[str, str] = {}

    def request_stop(self, signal_number: int) -> bool:
        """Stop as `ManifestRun.request_stop` does; while it waits, nothing is at work."""
        return self._at_work is not None and self._at_work.request_stop(signal_number)

    def run(self) -> Summary:
        """Run what is there and what comes, and return the counts of the last round.

        Raises as `ManifestRun.run` does, except where a source is missing that may still come.
        """
        summary, has_told = Summary(), False
        try:
            while self._ends_at is None or time.monotonic() < self._ends_at:
                if (request := self._arrivals.take()) is not None:
                    summary, has_told = self._round(request) or summary, False
                elif self._arrivals.is_over:
                    break
                elif not has_told:
                    has_told = True
                    self._on_event(Remark("waiting for more; Ctrl-C ends it", "info"))
        finally:
            if self._session is not None:
                self._session.end()
        return summary

    def _round(self, request: RunRequest) -> Summary | None:
        """Run what is left of a request; None if its sources are still to come."""
        config, policy = request.config, request.policy
        failure = _left_to_fail(config.failure, self._failed)
        # Failed jobs run again in the first round alone.
        policy = replace(policy, retry_failed=policy.retry_failed and not self._rounds)
        request = replace(request, config=replace(config, failure=failure), policy=policy)
        run = self._at_work = ManifestRun(request, self._keep)
        try:
            return run.run(self._show, age_s=time.monotonic() - self._began)
        except UsageError as error:
            if error.code not in _MAY_COME:
                raise
            self._on_event(Remark(str(error), "fault"))
            return None
        finally:
            self._at_work = None
            self._rounds += 1

    def _show(self, event: ManifestEvent) -> None:
        if isinstance(event, Remark) and self._rounds and event.kind != "fault":
            return  # it was told in the first round
        if isinstance(event, JobEnded) and (error := event.outcome.error) is not None:
            name = event.outcome.custom_id
            if self._told.get(name) == error.message and not event.outcome.attempt:
                return
            self._told[name] = error.message
            self._failed += 1
        self._on_event(event)

    def _keep(self, config: RunConfig) -> AnySession:
        if self._session is None:
            self._session = _KeptSession(session_for(config))
        return cast(AnySession, self._session)


class _KeptSession:
    """A session that stays open from one run to the next."""

    def __init__(self, session: AnySession) -> None:
        self._session = session

    def run(self, plan: Plan, folder: JobFolder) -> Generator[Event, None, None]:
        yield from self._session.run(plan, folder)

    def request_stop(self, signal_number: int) -> None:
        self._session.request_stop(signal_number)

    def close(self) -> None:
        """Do nothing: the next round needs the model."""

    def end(self) -> None:
        self._session.close()


def _left_to_fail(failure: FailurePolicy, failed: int) -> FailurePolicy:
    """Return the policy for one more round after so many failures. Raises RunHalted for none."""
    if failure.halt is None:
        return failure
    if failure.halt.endswith("%"):
        what, hint = "--halt takes a number with --follow", "how many jobs will come is not known"
        raise UsageError(what, hint=f"{hint}: give --halt 30", code="usage.follow")
    if (left := int(failure.halt) - failed) < 1:
        raise RunHalted(f"{failed} jobs failed, as many as --halt allows")
    return replace(failure, halt=str(left))
