"""Parallel degrees and their arithmetic. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How the ranks of one job divide the work: world = dp_replicate · dp_shard · tp · pp · cp.

    Ranks are laid out with tp fastest, then cp, dp_shard, dp_replicate and pp slowest, so that the ranks which
    talk most sit next to each other. Ranks that differ only in tp, pp or cp share samples.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name, degree in self.degrees().items():
            if degree < 1:
                raise ValueError(f"{name}={degree}: a degree is at least 1")

    @staticmethod
    def of(num_workers: int, *, tp: int = 1, pp: int = 1, cp: int = 1, dp_replicate: int | None = None) -> Plan:
        """Return the plan in which all ranks that tp, pp and cp leave are data parallel.

        `dp_replicate` of them hold copies, the others shards; None: all hold copies. Raises ValueError, with every
        factor, where num_workers does not divide.
        """
        left, rest = divmod(num_workers, tp * pp * cp)
        factors = " × ".join(f"{name}={degree}" for name, degree in (("tp", tp), ("pp", pp), ("cp", cp)) if degree > 1)
        if rest:
            # Of one degree the values that divide are told; of several, what number of ranks they need.
            degree = max(tp, pp, cp)
            one = degree == tp * pp * cp
            advice = _divisors(num_workers) if one else f"a multiple of {tp * pp * cp} ranks"
            raise ValueError(f"num_workers={num_workers} is not divisible by {factors}; allowed: {advice}")
        copies = left if dp_replicate is None else dp_replicate
        if left % copies:
            given = f" / ({factors})" if factors else ""
            raise ValueError(
                f"num_workers={num_workers}{given} = {left} is not divisible by dp_replicate={copies}; "
                f"allowed: {_divisors(left)}"
            )
        return Plan(dp_replicate=copies, dp_shard=left // copies, tp=tp, pp=pp, cp=cp)

    def degrees(self) -> dict[str, int]:
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Number of distinct shares of a window's samples."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return this rank's index along each degree."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a world of {self.world} = {self._product()}")
        index: dict[str, int] = {}
        for name, degree in reversed(self.degrees().items()):
            rank, index[name] = divmod(rank, degree)
        return index

    def dp_rank(self, rank: int) -> int:
        """Return which of the `dp` shares of a window this rank computes."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def accumulation(self, global_batch_size: int, micro_batch_size: int) -> int:
        """Return gradient_accumulation_steps = global_batch_size / (micro_batch_size · dp).

        Raises ValueError, which names every factor, when it does not divide: a batch is never rounded.
        """
        per_micro_step = micro_batch_size * self.dp
        if global_batch_size % per_micro_step:
            below = global_batch_size - global_batch_size % per_micro_step
            near = " or ".join(str(n) for n in (below, below + per_micro_step) if n)
            raise ValueError(
                f"global_batch_size={global_batch_size} is not divisible by micro_batch_size={micro_batch_size} × "
                f"dp={self.dp} (dp_replicate={self.dp_replicate} × dp_shard={self.dp_shard}) = {per_micro_step}; "
                f"nearest: {near}"
            )
        return global_batch_size // per_micro_step

    def _product(self) -> str:
        return " × ".join(f"{name}={degree}" for name, degree in self.degrees().items())


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
