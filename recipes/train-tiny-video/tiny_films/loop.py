"""The training loop that all three trainers share: steps until a stage's time is up."""

from collections.abc import Callable

from tiny_world.run_state import RunState

from tiny_films.means import Means

# Trains one step, at a fraction of the time; returns facts for the log.
Step = Callable[[float], dict[str, float]]


def train(
    state: RunState,
    step: Step,
    *,
    minutes: float,
    max_steps: int | None,
    behind: Callable[[], None] = lambda: None,
) -> None:
    """Train until the time or the steps are used up, both over all resumed runs.

    The result is the state file. `behind` is called after each step.
    """
    budget_s, means = minutes * 60, Means()
    while state.elapsed_s < budget_s and state.step != max_steps:
        with state.timed_step():
            means.add(step(state.elapsed_s / budget_s))
        if state.is_log_due:
            state.log(means.taken())
        state.save_if_due()
        behind()
    if facts := means.taken():
        state.log(facts)
    state.save()
