"""An episode as a moving picture, for people: in the run's folder, and on the page of `tidemill watch`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.environment.vector.duel import DuelSlots
from tidemill.environment.vector.making import make_slots
from tidemill.environment.vector.slots import BatchedSlots, EnvSlots
from tidemill.observe.pictures import FOLDER, smaller
from tidemill.recipe.environment import EnvironmentSettings
from tidemill.rollout.control.opponents import Known, known_players

MOST_FRAMES, MOST_TICKS = 100, 2000
FRAME_MS, LAST_MS = 50, 1500
DRAW_S, LEAST_FRAMES = 3.0, 16  # where drawing is slow, a picture has fewer frames
WIDE = 240  # pixels of the longer side
KEPT = 20  # pictures of one run

Pixels = npt.NDArray[np.uint8]


def film(settings: EnvironmentSettings, policy: Any, seed: int, run: Path, version: int) -> str:
    """Show the first episode of an evaluation, thinned if it is long; return what is missing, or an empty string."""
    if "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo first draws
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        from PIL import Image

        frames = [Image.fromarray(smaller(frame, WIDE)) for frame in _played(settings, policy, seed)]
    except Exception as error:  # a renderer that is not installed must not end a run
        first = (str(error).splitlines() or [""])[0][:160]
        return f"no picture of an episode: {type(error).__name__}: {first}"
    if not frames:
        return "no picture of an episode: the environment draws none"
    file = run / FOLDER / f"episode-{version:08d}.gif"
    file.parent.mkdir(parents=True, exist_ok=True)
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_MS]
    aside = file.with_suffix(".tmp")
    frames[0].save(aside, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    aside.replace(file)
    for old in sorted(run.glob(f"{FOLDER}/episode-*.gif"))[:-KEPT]:
        old.unlink(missing_ok=True)
    return ""


def _played(settings: EnvironmentSettings, policy: Any, seed: int) -> list[Pixels]:
    slots = make_slots(settings, 1, render=True)
    try:
        if isinstance(slots, DuelSlots):
            for player in known_players(slots.game).values():  # the last is the strongest
                slots.others = Known(player)
        own, seeds = np.arange(slots.count), np.full(slots.count, seed, np.int64)
        seen = slots.reset(own, seeds)
        state = np.zeros((slots.count, policy.state_width), np.float32) if policy.state_width else None
        _drawn(slots)  # the first is slow: a window or a library is opened
        began = time.perf_counter()
        frames, every = [_drawn(slots)], 1
        most = min(MOST_FRAMES, max(LEAST_FRAMES, int(DRAW_S / (time.perf_counter() - began + 1e-6))))
        for tick in range(1, MOST_TICKS):
            acted = policy.act(seen, None, state)
            state = acted.state
            stepped = slots.step(own, policy.moves(acted.actions), seeds)
            if stepped.ends[0]:
                break
            seen = stepped.observations
            if tick % every == 0:
                frames.append(_drawn(slots))
            if len(frames) > most:
                frames, every = frames[::2], 2 * every
        return [frame for frame in frames if frame is not None]
    finally:
        slots.close()


def _drawn(slots: Any) -> Pixels | None:
    """What the first slot looks like."""
    if isinstance(slots, EnvSlots):
        found = slots.envs[0].render()
    elif isinstance(slots, BatchedSlots | DuelSlots):
        inner = slots.inner if isinstance(slots, BatchedSlots) else slots.game
        draw = getattr(inner, "picture", None)
        found = None if draw is None else draw(0)
    else:
        found = getattr(getattr(slots, "envs", [None])[0], "render", lambda: None)()
    return None if found is None else np.asarray(found, np.uint8)
