"""Kinds of traffic by name."""

from __future__ import annotations

from kvpool.soak.profiles.adversarial import Adversarial
from kvpool.soak.profiles.agents import Agents
from kvpool.soak.profiles.base import Profile
from kvpool.soak.profiles.beam import Beam
from kvpool.soak.profiles.chat import Chat
from kvpool.soak.profiles.speculative import Speculative
from kvpool.soak.profiles.tiers import Tiers

PROFILES: dict[str, type[Profile]] = {
    "chat": Chat,
    "agents": Agents,
    "beam": Beam,
    "speculative": Speculative,
    "adversarial": Adversarial,
    "tiers": Tiers,
}
