"""How generated examples are drawn: the same ones in every run, however slow the machine is.

What decides over a change must say the same of the same tree. `make explore` draws others.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SLOW_IS_NO_FAULT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("same", derandomize=True, **SLOW_IS_NO_FAULT)
settings.register_profile("explore", print_blob=True, **SLOW_IS_NO_FAULT)
settings.load_profile("same")
