"""Objectives on speed."""

from sweeps.objectives import objective

objective("target_tokens_per_second", "maximize", "target tok/s", "fastest", lambda e: e.targets / e.step_time_s)
objective("tokens_per_second", "maximize", "tok/s", "most tokens per second", lambda e: e.tokens / e.step_time_s)
objective(
    "tokens_per_second_per_device", "maximize", "tok/s/device", "most tokens per device",
    lambda e: e.tokens / e.step_time_s / e.workers,
)  # fmt: skip
objective("step_time_s", "minimize", "step s", "shortest step", lambda e: e.step_time_s)
