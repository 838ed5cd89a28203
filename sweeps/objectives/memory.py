"""Objectives on memory."""

from sweeps.objectives import objective

objective("peak_memory_gib", "minimize", "peak GiB", "least memory", lambda e: e.memory_gib)
objective("host_peak_memory_gib", "minimize", "host GiB", "least host memory")
