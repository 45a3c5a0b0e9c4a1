"""A kit's arm for sessions on a busy machine, which ``robot.driver=session_so101:Patient`` names:
lerobot gives a servo 50 ms to answer, and this gives it seconds."""

from __future__ import annotations

from typing import Any

from real.so101 import SO101Arm


class Patient(SO101Arm):
    def __init__(self, *given: Any, **options: Any) -> None:
        from lerobot.motors.feetech import feetech

        def patient(port: Any, length: int) -> None:
            port.packet_start_time = port.getCurrentTime()
            port.packet_timeout = port.tx_time_per_byte * (length + 3.0) + 3000.0

        feetech.patch_setPacketTimeout = patient
        super().__init__(*given, **options)
