"""A network from a recipe's settings, and from a run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tidemill.errors import ModelError
from tidemill.models.network.actor_critic import ActorCritic
from tidemill.models.network.judges import SoftActorCritic, ValuesOfChoices
from tidemill.models.spaces import Spaces
from tidemill.recipe.model import PolicySettings

DEFINITION = "policy.json"
KINDS: dict[str, Any] = {"states": ActorCritic, "soft": SoftActorCritic, "choices": ValuesOfChoices}

CPU = torch.device("cpu")


def kind_of(settings: PolicySettings, spaces: Spaces) -> str:
    if settings.judges != "actions":
        return "states"
    return "choices" if spaces.choices else "soft"


def make(settings: PolicySettings, seed: int, device: torch.device) -> Any:
    if not settings.spaces:
        raise ModelError(
            "model.policy has no spaces: it is not known what it sees and does",
            "name an environment in the recipe, whose spaces are taken",
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        spaces = Spaces.of(settings.spaces)
        return KINDS[kind_of(settings, spaces)](settings, spaces).to(device).eval()


def save(model: Any, folder: Path) -> None:
    """Settings and weights, which `open_saved` reads."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / DEFINITION).write_text(json.dumps(model.settings.model_dump(mode="json"), indent=1) + "\n")
    save_file(
        {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}, folder / "policy.safetensors"
    )


def open_saved(folder: Path, device: torch.device = CPU) -> Any:
    from safetensors.torch import load_file

    settings = PolicySettings.model_validate_json((folder / DEFINITION).read_text())
    made = make(settings, 0, device)
    made.load_state_dict(load_file(folder / "policy.safetensors"))
    return made
