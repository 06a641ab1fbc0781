"""Experts in main memory: which stay on the GPU, and the time to fetch the others.

A token waits only for the link: its products are far faster than the copies. A denoise step
computes while copies run, and takes as long as they do on a card of about 100 TFLOP/s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hyimg_cli.journal.keys import precision
from hyimg_cli.memory.available import AvailableMemory
from hyimg_cli.memory.fit import spare_bytes
from hyimg_cli.memory.footprint import held_form, held_weights, needs, usable_bytes
from hyimg_cli.models.registry import model_card
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import ImageJob

# For locked memory over PCIe 4.0 x16; the assumption without a measurement.
STATED_BYTES_S = 25e9


@dataclass(frozen=True)
class ExpertTraffic:
    """Experts of a model that stay, and seconds to fetch the rest over a link.

    `token_s`: by rows that write together, of which `together` fit.
    """

    waiting: int
    resident: int
    step_s: float
    token_s: dict[int, float]
    together: int

    def text_s(self, tokens: int) -> float:
        """Return the seconds of a job's text if as many jobs write together as fit."""
        return tokens * self.token_s[self.together] / self.together


def traffic(
    jobs: Sequence[ImageJob], config: RunConfig, there: AvailableMemory | None, link_bytes_s: float
) -> ExpertTraffic:
    """Return the expert traffic of one model's jobs over a link of this many bytes a second."""
    card = model_card(jobs[0].model, config.model.revision)
    routing = card.routing
    assert routing is not None, "there are experts, or it is refused"
    nbytes = card.weights.experts_nbytes(*held_form(config))
    resident = min(nbytes, spare_bytes(jobs, config, there)) if there else 0
    together = max(1, min(config.batch.max_size, sum(job.writes_text for job in jobs)))
    if there:
        room = usable_bytes(there.free - held_weights(card, config))
        together = needs(jobs, card, config).fitting(room, together).thinking
    step_s = (nbytes - resident) / link_bytes_s
    # Include 1 and 16 in any case.
    counts = sorted({1, together, 16})
    token_s = {rows: routing.distinct(rows) / routing.experts * step_s for rows in counts}
    return ExpertTraffic(nbytes, resident, step_s, token_s, together)


def measured_link(config: RunConfig) -> float | None:
    """Measure bytes a second to the GPU by copies of locked memory; None without a GPU."""
    if precision(config.model)[0] != "cuda":
        return None
    from hyimg_cli.kernels.devices import measure_link
    from hyimg_cli.parallel.devices import gpu_count, gpus_of

    return measure_link(gpus_of(config.model)[0]) if gpu_count() else None
