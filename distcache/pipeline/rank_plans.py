"""From what the homes decided about a step to one rank's plans of it, group by group."""

from __future__ import annotations

from collections.abc import Sequence

from distcache.pipeline.exchange import Decided
from distcache.pipeline.groups import TableGroup
from distcache.pipeline.planned import PlanningSettings, Waiting
from distcache.pipeline.regions import Region, sharded_part
from distcache.pipeline.split import StepPart, split_step
from distcache.planner.assemble import HomePart, assemble, next_move_after
from distcache.planner.home import HomeDecision
from distcache.planner.regions import nothing
from distcache.step_plan import StepPlan, check_plan, check_plan_fully


class RankPlans:
    """One rank's plans, step after step. `regions`: of all groups; `slots`: C per group, or None
    where the buffer grows; `size`: W."""

    def __init__(
        self,
        groups: Sequence[TableGroup],
        regions: Sequence[Region],
        slots: Sequence[int | None],
        settings: PlanningSettings,
        size: int,
    ) -> None:
        self._regions, self._slots = list(regions), list(slots)
        self._settings, self._size = settings, size
        self._move_after = [-1] * len(groups)

    def restore(self, step: int) -> None:
        """Go on after `step`: nothing moves before it has been applied."""
        self._move_after = [step] * len(self._move_after)

    def of(
        self, entry: Waiting, decided: Decided, own: Sequence[HomeDecision]
    ) -> tuple[list[StepPlan], tuple[StepPart, ...]]:
        """The checked plans of a step on which all homes decided, by group, and its hot and cold
        part if steps are split. `own`: the decisions of this rank's home, by region."""
        plans = []
        for group, slots in enumerate(self._slots):
            plan = self._plan(group, entry, decided, own)
            if self._settings.validate:
                check_plan_fully(plan, slots)
            else:
                check_plan(plan)
            plans.append(plan)
        if self._settings.hot is None or entry.batch.kind != "train":
            return plans, ()
        return plans, split_step(entry.batch, entry.bags, plans, self._settings.hot)

    def _plan(
        self, group: int, entry: Waiting, decided: Decided, own: Sequence[HomeDecision]
    ) -> StepPlan:
        """The plan of one group from the decisions on its regions."""
        places = [place for place, region in enumerate(self._regions) if region.group == group]
        latest, before = [decided.latest_use[p] for p in places], self._move_after[group]
        move_after = next_move_after(entry.step, self._settings.prefetch, latest, before)
        self._move_after[group] = move_after
        mine, sharded = nothing((entry.step, entry.batch.kind), self._size), None
        parts = [HomePart(mine.slots, mine.fetch, mine.slots)] * self._size
        for place in places:
            if self._regions[place].sharded:
                sharded = sharded_part(place, decided, own[place], self._settings.early)
            else:
                parts, mine = decided.parts[place], own[place]
        return assemble(entry.requests[group], parts, mine, move_after, sharded)
