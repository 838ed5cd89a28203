"""Where one rank stands among the ranks of its job, and the groups of ranks that it sums with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainers.plan import Plan
from trainers.ranks import World, ensure_group


class Layout:
    """A plan, laid over the ranks of a world. The mesh is made when it is first asked for, by every rank alike."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        self.at = plan.coordinates(world.rank)
        self.dp_rank = plan.dp_rank(world.rank)

    @staticmethod
    def alone(world: World) -> Layout:
        """Return the layout of a job that rank 0 does by itself. It makes a group, so every rank must call it."""
        return _Alone(world) if world.size > 1 else Layout(Plan(), world)

    @property
    def device(self) -> torch.device:
        return self.world.device

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks, one dimension a degree: pp, dp_replicate, dp_shard, cp, tp."""
        ensure_group(self.world)
        return _mesh(self.device.type, tuple(self.plan.degrees().items()), dist.group.WORLD)

    @cached_property
    def data(self) -> DeviceMesh:
        """The ranks that hold other samples or other parts of a sequence: gradients and losses are summed over them."""
        return self.mesh["dp_replicate", "dp_shard", "cp"]._flatten("data")

    @cached_property
    def shard(self) -> DeviceMesh:
        """Where weights are sharded: dp_shard × cp, or dp_replicate × dp_shard where there are copies (cp is 1)."""
        if self.plan.dp_replicate > 1:
            return self.mesh["dp_replicate", "dp_shard"]
        return self.mesh["dp_shard", "cp"]._flatten("shard")

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over distinct data, in float64, on every rank.

        Ranks that differ in tp alone hold the same value, which counts once. Of a pipeline, one stage holds it and the
        others bring 0.
        """
        if self.plan.tp == 1:
            return self.world.sum(values)
        on_device = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(on_device, group=self.data.get_group())
        if self.plan.pp > 1:
            dist.all_reduce(on_device, group=self.mesh["pp"].get_group())
        return [float(v) for v in on_device.tolist()]


class _Alone(Layout):
    """Rank 0 by itself in a world of several."""

    def __init__(self, world: World) -> None:
        super().__init__(Plan(), World(0, 1, world.device))
        self._group = _first_rank(dist.group.WORLD)

    @cached_property
    def data(self) -> DeviceMesh:
        return DeviceMesh.from_group(self._group, self.device.type, mesh_dim_names=("data",))


@cache
def _first_rank(_: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group of the first rank; once a process, as `_mesh`."""
    group: dist.ProcessGroup = dist.new_group([0])
    return group


@cache
def _mesh(device: str, degrees: tuple[tuple[str, int], ...], _: dist.ProcessGroup | None) -> DeviceMesh:
    """Return the mesh of these degrees over the group that was joined, once: each makes groups, with threads.

    Made anew for every trial they would stay, and a process that takes many trials would drown in them.
    """
    return init_device_mesh(device, tuple(n for _, n in degrees), mesh_dim_names=tuple(name for name, _ in degrees))
