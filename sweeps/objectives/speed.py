"""Objectives on speed."""

from sweeps.objectives import objective

objective("target_tokens_per_second", "maximize", "target tok/s", "fastest")
objective("tokens_per_second", "maximize", "tok/s", "most tokens per second")
objective("tokens_per_second_per_device", "maximize", "tok/s/device", "most tokens per device")
objective("step_time_s", "minimize", "step s", "shortest step")
