"""Objectives on quality and its price."""

from sweeps.objectives import objective

objective("cost_per_quality_usd", "minimize", "USD to target", "cheapest", lambda e: e.cost_usd)
objective("time_to_target_s", "minimize", "s to target", "soonest at the target", lambda e: e.time_to_target_s)
objective("eval_loss", "minimize", "eval loss", "lowest eval loss", learned=True)
