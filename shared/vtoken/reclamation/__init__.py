"""Reclamation: planners, the manager that decides when they run, admission and pressure (SPEC §4, §9)."""

from vtoken.errors import SpecError
from vtoken.reclamation.evacuate import EvacuatePlanner
from vtoken.reclamation.fill import FillPlanner
from vtoken.reclamation.plan import Planner, PoolView, ReclamationPlan, TableView
from vtoken.reclamation.release import ReleasePlanner

__all__ = [
    "EvacuatePlanner",
    "FillPlanner",
    "Planner",
    "PoolView",
    "ReclamationPlan",
    "ReleasePlanner",
    "TableView",
    "get_planner",
]

_PLANNERS: dict[str, type[Planner]] = {"evacuate": EvacuatePlanner, "fill": FillPlanner, "release": ReleasePlanner}


def get_planner(name: str) -> Planner:
    """A planner by name, with its default settings."""
    try:
        return _PLANNERS[name]()
    except KeyError:
        raise SpecError(f"unknown planner {name!r}: choose one of {', '.join(_PLANNERS)}") from None
