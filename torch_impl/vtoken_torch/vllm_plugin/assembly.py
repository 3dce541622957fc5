"""Which parts run in an engine: the one place that knows all of them."""

from typing import TYPE_CHECKING

from vtoken_torch.vllm_plugin.fences import CopyReport, FenceKeeper
from vtoken_torch.vllm_plugin.lazy.holes import HoleKeeper
from vtoken_torch.vllm_plugin.mass.feed import MassFeed
from vtoken_torch.vllm_plugin.mass.keeper import MassKeeper
from vtoken_torch.vllm_plugin.metrics.publisher import Publisher, open_sink
from vtoken_torch.vllm_plugin.metrics.readings import Readings
from vtoken_torch.vllm_plugin.options import PluginOptions
from vtoken_torch.vllm_plugin.parts import SchedulerPart, WorkerPart
from vtoken_torch.vllm_plugin.timeline import Timeline
from vtoken_torch.vllm_plugin.verify.checks import OnlineChecks
from vtoken_torch.vllm_plugin.verify.fingerprints import Fingerprints

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.scheduler import VTokenScheduler
    from vtoken_torch.vllm_plugin.worker_side import WorkerSide

__all__ = ["scheduler_parts", "worker_parts"]


def scheduler_parts(scheduler: "VTokenScheduler", options: PluginOptions) -> list[SchedulerPart]:
    """The scheduler side's parts, in the order in which they are called."""
    fences = [FenceKeeper(scheduler.vtoken.ledger)] if options.copy_stream == "own" else []
    checks = [OnlineChecks(scheduler)] if options.verify else []
    mass = MassFeed(scheduler.vtoken, options.mass_every, scheduler.shortage)
    return [*fences, *checks, mass, *_observers(scheduler, options, *checks)]


def worker_parts(side: "WorkerSide", options: PluginOptions) -> list[WorkerPart]:
    """A worker's parts, in the order in which they are called."""
    fences = [CopyReport(side.copies)] if options.copy_stream == "own" else []
    fingerprints = [Fingerprints(side)] if options.verify else []
    holes = [HoleKeeper(side)] if options.is_lazy else []
    mass = MassKeeper(side, *holes, replaces=options.signal_source == "attention")
    return [*fences, *fingerprints, *holes, mass]  # holes first: their layers lie beneath


def _observers(
    scheduler: "VTokenScheduler", options: PluginOptions, checks: OnlineChecks | None = None
) -> list[SchedulerPart]:
    sink = open_sink(scheduler) if options.metrics else None
    if sink is None and options.timeline is None:
        return []
    readings = Readings(scheduler, checks)
    publisher = [] if sink is None else [Publisher(readings, sink)]
    timeline = [] if options.timeline is None else [Timeline(readings, options.timeline, options.config)]
    return [readings, *publisher, *timeline]
