"""A controller that begins where another one has gone: processes that serve already are taken over, not started anew.

Where each role has hosts of its own (`cluster.by_pool`), processes outlive their controller and its host.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from pd_engine.errors import PdRelayError
from pd_engine.settings import Settings
from pd_ops.cluster.actors import ServingAlready, actor_log_path
from pd_ops.cluster.placed_actor import PlacedActor, find_actors
from pd_ops.cluster.plan import ActorPlan, ClusterPlan, Role

ANSWER_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A process that serves."""

    actor: PlacedActor
    life: int
    serving: ServingAlready

    @property
    def plan(self) -> ActorPlan:
        return self.actor.plan


async def find_serving(settings: Settings, plan: ClusterPlan) -> list[Found]:
    """The latest life of each id that serves; what does not, or no longer should, is ended."""
    handles = find_actors(settings)
    latest = {actor_id: max(life for one, life in handles if one == actor_id) for actor_id, _ in handles}
    asked = [
        _ask(_placed(settings, plan, actor_id, handle), life, is_latest=life == latest[actor_id])
        for (actor_id, life), handle in handles.items()
    ]
    return [found for found in await asyncio.gather(*asked) if found is not None]


async def _ask(actor: PlacedActor, life: int, *, is_latest: bool) -> Found | None:
    serving: Any = None
    if is_latest:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                serving = await actor.call("describe")
        except (PdRelayError, TimeoutError) as error:
            log.warning("%s is started anew: %s", actor.plan.actor_id, error)
    if serving is None:
        actor.kill()
        return None
    return Found(actor=actor, life=life, serving=serving)


def _placed(settings: Settings, plan: ClusterPlan, actor_id: str, handle: Any) -> PlacedActor:
    role = Role(actor_id.partition("-")[0])
    own = plan.router if role is Role.ROUTER else plan.named(role, actor_id)
    return PlacedActor(own, actor_log_path(settings.cluster.name, actor_id), handle)
