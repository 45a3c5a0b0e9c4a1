"""A leader arm as somebody registers it with lerobot: two joints that rest where a test's
follower is."""

from __future__ import annotations

from dataclasses import dataclass

from lerobot.teleoperators.config import TeleoperatorConfig
from lerobot.teleoperators.teleoperator import Teleoperator


@TeleoperatorConfig.register_subclass("test_leader")
@dataclass
class TestLeaderConfig(TeleoperatorConfig):
    port: str = ""


class TestLeader(Teleoperator):
    __test__ = False
    config_class, name = TestLeaderConfig, "test_leader"
    action_features = {"pan.pos": float, "lift.pos": float}  # noqa: RUF012 - as lerobot's own classes have it
    feedback_features: dict = {}  # noqa: RUF012
    is_calibrated = is_connected = True

    def __init__(self, config: TestLeaderConfig):
        self.config = config  # without lerobot's own, which makes a folder for calibrations

    def connect(self, calibrate: bool = True) -> None:
        if self.config.port != "here":
            raise ConnectionError(f"nothing at {self.config.port}")

    def get_action(self) -> dict[str, float]:
        return {"pan.pos": 2.0, "lift.pos": 1.0}

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def send_feedback(self, feedback: dict) -> None: ...

    def disconnect(self) -> None: ...
