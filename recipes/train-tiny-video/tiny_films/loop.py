"""Steps of a stage until its time is up: what all three trainers have in common."""

from collections.abc import Callable

from tiny_world.run_state import RunState

from tiny_films.means import Means

# Trains one step, at a share of the time; facts for the log.
Step = Callable[[float], dict[str, float]]


def train(
    state: RunState,
    step: Step,
    *,
    minutes: float,
    max_steps: int | None,
    behind: Callable[[], None] = lambda: None,
) -> None:
    """Up to the end of the time or the steps, both over all resumed runs; the result is the state
    file. `behind` is called after each step.
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
