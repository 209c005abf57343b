"""Which implementation stands behind ``--size auto``."""

from __future__ import annotations

from outpace.control.adaptive import Adaptive
from outpace.control.cost import Cost
from outpace.control.policy import Policy
from outpace.drafters.base import Drafter

try:
    from outpace.control.adaptive_native import NativeAdaptive
except ImportError:  # no extension, or one from before it had the policy: the reference, slower
    NativeAdaptive = None  # type: ignore[assignment,misc]


def policy_for(drafter: Drafter, cost: Cost) -> Policy:
    """A policy for what ``drafter`` proposes, on a machine where forwards cost ``cost``."""
    if NativeAdaptive is not None and drafter.stepwise is None and not drafter.explores:
        return NativeAdaptive(cost)
    return Adaptive(cost, stepwise=drafter.stepwise, mixed=drafter.mixed, whole=drafter.explores)
