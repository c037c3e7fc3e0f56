"""The planner's arithmetic, handed to the trace lab: one model on one kind of device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pellucid.core.errors import ConfigError
from pellucid.planner.ceilings import TraceCeilings
from pellucid.planner.hardware import Device
from pellucid.planner.memory import plan_memory
from pellucid.planner.roofline import Roofline
from pellucid.planner.shape import ModelShape
from pellucid.workload.analyze import Room, Rung

_MAX_TP = 8


class PlannerCeilings:
    """Satisfies `workload.analyze.Ceilings`. The FLOPs and bytes of tensor parallelism's communication are left out."""

    def __init__(self, shape: ModelShape, device: Device) -> None:
        self._shape = shape
        self._device = device
        self._ceilings = TraceCeilings(Roofline(shape, device))

    def rungs(self, requests: Iterable[tuple[int, int, int]], batch: float) -> Sequence[Rung]:
        load = self._ceilings.load(requests)
        compute, memory = self._ceilings.compute_seconds(load), self._ceilings.memory_seconds(load)
        at_once = self._ceilings.memory_seconds(load, batch)
        seen = {"attention": (compute, None), "bandwidth": (compute, memory), "capacity": (compute, at_once)}
        found = []
        for rung in self._ceilings.ladder(load, batch=batch):
            by_compute, by_memory = seen.get(rung.name, (rung.device_seconds, None))
            found.append(Rung(rung.name, rung.device_seconds, by_compute, by_memory, rung.meaning))
        return found

    def room(self, num_devices: int, context: int) -> Room:
        """The split into replicas of 1, 2, 4 or 8 tensor-parallel ranks that leaves most room."""
        best = Room(0, 1)
        tp = 1
        while tp <= min(num_devices, _MAX_TP):
            try:
                self._shape.check_tp(tp)
            except ConfigError:
                break
            replicas = num_devices // tp
            tokens = plan_memory(self._shape, self._device, tp=tp).kv_tokens(context)
            best = max(best, Room(tokens * replicas, replicas))
            tp *= 2
        return best
