"""How far a trial may be from one process before it has done something else. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

TIMES_NOISE = 4.0
# Two orders may agree to the last digit, and another division of the work still rounds elsewhere: 16 times the last
# digit of a float32. In bfloat16 tensor parallelism rounds partial sums before it adds them: gradient norms 2 % apart
# were seen in the second update, where one process itself is 1 % from float32. The small model is the sharp test there.
LEAST_TOLERANCE: Mapping[str, float] = {"float32": 16 * 2.0**-23, "bfloat16": 2.0**-5}
# Of the miniature: right code is within 1e-14 and 1e-6, and every fault that was ever seen above 1e-3.
LIMITS: Mapping[str, float] = {"float64": 1e-10, "float32": 1e-5}
