"""Experts that wait in main memory: what stays on the GPU, and what fetching the others costs.

A token waits for the link alone: its products are far quicker than copies over it. A denoise step's
go on beside the copies, and take as long as they do on a card of some 100 TFLOP/s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hyimg_cli.journal.keys import precision
from hyimg_cli.memory.available import AvailableMemory
from hyimg_cli.memory.fit import need
from hyimg_cli.memory.footprint import held_weights, needs, usable
from hyimg_cli.models.registry import model_card
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import ImageJob

# Of locked memory over PCIe 4.0 x16; what is not measured is taken to be so.
STATED_BYTES_S = 25e9
# Numbers of rows whose tokens are told in any case.
ROWS = (1, 16)
# A text that takes a job longer than this is better written elsewhere.
HOPELESS_TEXT_S = 60.0
_TRIAL_BYTES, _TRIALS = 1 << 28, 3


@dataclass(frozen=True)
class Link:
    """Bytes a second from main memory to the GPU, measured or as stated above."""

    bytes_s: float
    is_measured: bool


@dataclass(frozen=True)
class ExpertTraffic:
    """What of a model's experts stays, and seconds of fetching the rest over a link: `token_s` by
    rows that write together, of which `together` have room.
    """

    waiting: int
    resident: int
    link: Link
    step_s: float
    token_s: dict[int, float]
    together: int

    def text_s(self, tokens: int) -> float:
        """Seconds of a job's text, where as many jobs write together as have room."""
        return tokens * self.token_s[self.together] / self.together


def spare_bytes(
    model: str, jobs: Sequence[ImageJob], config: RunConfig, there: AvailableMemory
) -> int:
    """Bytes for experts that may stay on the GPU beside a full batch."""
    most = min(config.batch.max_size, max(1, len(jobs)))
    needed = need(model, jobs, config, together=most)
    return max(0, usable(there.free - needed.total))


def traffic(
    model: str,
    jobs: Sequence[ImageJob],
    config: RunConfig,
    there: AvailableMemory | None,
    link: Link,
) -> ExpertTraffic | None:
    """The traffic of a model's experts; None where it has none."""
    card = model_card(model, config.model.revision)
    if card.routing is None or card.weights is None:
        return None
    form = precision(config.model)[1], config.model.quantization
    routing, nbytes = card.routing, card.weights.experts_nbytes(*form)
    resident = min(nbytes, spare_bytes(model, jobs, config, there)) if there else 0
    missing = 1 - resident / nbytes
    together = max(1, min(config.batch.max_size, sum(job.writes_text for job in jobs)))
    if there:
        room = usable(there.free - held_weights(card, config))
        together = needs(jobs, card, config).fitting(room, together).thinking
    token_s = {
        rows: routing.distinct(rows) / routing.experts * nbytes * missing / link.bytes_s
        for rows in sorted({*ROWS, together})
    }
    return ExpertTraffic(nbytes, resident, link, nbytes * missing / link.bytes_s, token_s, together)


def link_of(config: RunConfig) -> Link:
    """The link to this machine's GPU, where the run has one: a few copies of locked memory."""
    if precision(config.model)[0] == "cuda":
        import torch

        from hyimg_cli.parallel.devices import gpus_of

        if torch.cuda.is_available():
            with torch.cuda.device(gpus_of(config.model)[0]):
                return Link(_measured(), is_measured=True)
    return Link(STATED_BYTES_S, is_measured=False)


def _measured() -> float:
    import torch

    host = torch.empty(_TRIAL_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_TRIAL_BYTES, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(_TRIALS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        there.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return float(_TRIAL_BYTES / min(seconds))
