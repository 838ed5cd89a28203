"""ZeRO stage 1 by torch alone: each rank keeps the optimizer's state of its share of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from trainers.engine import SAVED, NativeEngine
from trainers.strategies import Setting


class TorchZeroEngine(NativeEngine):
    """The native engine over a ZeroRedundancyOptimizer, whose state each rank saves for itself."""

    @classmethod
    def saved_as(cls, setting: Setting, world_size: int) -> str:
        return f"zero_engine=torch on {world_size} ranks"

    @property
    def _own(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's share."""
        wrapped: Any = self.optimizer
        own: torch.optim.Optimizer = getattr(wrapped, "optim", wrapped)  # one rank has nothing to share
        return own

    def _states(self) -> Iterator[dict[str, Any]]:
        yield from self._own.state.values()

    def save(self, folder: Path) -> None:
        model = self._of_trained(get_model_state_dict(self.module, options=SAVED))
        state_dict_saver.save({"model": model}, checkpoint_id=folder, no_dist=self._layout.world.size == 1)
        torch.save(self._own.state_dict(), folder / f"optimizer-{self._layout.world.rank}.pt")

    def load(self, folder: Path, updates: int) -> None:
        model = self._of_trained(get_model_state_dict(self.module, options=SAVED))
        state_dict_loader.load({"model": model}, checkpoint_id=folder, no_dist=self._layout.world.size == 1)
        set_model_state_dict(self.module, model, options=SAVED)
        own = torch.load(folder / f"optimizer-{self._layout.world.rank}.pt", weights_only=True)
        self._own.load_state_dict(own)
        self._has_state = updates > 0
        self._schedule_after(updates)
