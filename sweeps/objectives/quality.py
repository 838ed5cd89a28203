"""Objectives on quality and its price."""

from sweeps.objectives import objective

objective("cost_per_quality_usd", "minimize", "USD to target", "cheapest")
objective("time_to_target_s", "minimize", "s to target", "soonest at the target")
objective("eval_loss", "minimize", "eval loss", "lowest eval loss")
