import numpy as np

from sim.simple import SimpleSimulator, spot
from vla_rl import splits
from vla_rl.specs import CameraSpec, EmbodimentSpec, TaskSpec


class Center(SimpleSimulator):
    """Move the dot to the middle of the picture. A running episode's state is where the dot is."""

    privileged_dim = 2  # what a critic may see besides; 0: nothing
    tasks = (TaskSpec("center", ("go to the middle",), ("move to the centre",), horizon=20),)
    embodiment = EmbodimentSpec(
        name="dot",
        action_names=("dx", "dy"),
        action_units=("m", "m"),
        action_low=(-0.02, -0.02),
        action_high=(0.02, 0.02),
        frame="world",
        rotation="none",
        gripper="none",
        control_hz=10.0,
        cameras=(CameraSpec("top", height=16, width=16),),
        proprio_names=("share_of_time_left",),
    )

    def begin(self, episode, rng):
        return splits.sample_xy(rng, (-0.1, -0.1), (0.1, 0.1), episode.split)

    def move(self, s, action):
        s.state = np.clip(s.state + action, -0.1, 0.1)
        return np.linalg.norm(s.state) < 0.012

    def look(self, s):
        image = np.repeat(spot(s.state, 0.12, 16)[..., None], 3, axis=2)
        return {"top": image}, [s.time_left], s.state

    def expert(self, s):
        return -s.state
