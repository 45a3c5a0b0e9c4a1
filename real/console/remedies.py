"""What to do about a fault, in words for whoever stands beside the arm."""

from __future__ import annotations

REMEDIES = {  # by words that stand in the fault's name; the first that fits
    "e-stop": "Look at the arm. When it is clear, release the e-stop, acknowledge, arm.",
    "estop": "Look at the arm. When it is clear, release the e-stop, acknowledge, arm.",
    "reflex": "The arm met something. Free it, acknowledge, arm; it comes back slowly.",
    "force": "The arm pushed too hard. Free it, acknowledge, arm.",
    "power": "Check the arm's power and its own emergency button, then acknowledge.",
    "robot": "Check the arm's cable and power. It is found again by itself; then acknowledge.",
    "camera": "Check the camera's cable; its process restarts by itself. Acknowledge when the "
    "picture moves.",
    "policy": "The policy's process was silent. It restarts by itself; acknowledge, then start "
    "again.",
    "teleop": "The input device was silent. Plug it in again, then take over anew.",
    "console": "The console was silent. Reload the page, then take control.",
    "record": "Nothing can be recorded. Check the disk, then acknowledge.",
    "disk": "Make room on the recording's disk, then acknowledge.",
    "clock": "The computer's clock jumped or a loop stood still. Look for a busy process, then "
    "acknowledge.",
    "silence": "Commands stopped coming. Look which process is missing, then acknowledge.",
    "clip": "The policy kept asking for more than the limits allow. Take over or reset.",
}
DEFAULT = "Look at the arm, remove the cause, acknowledge, arm."


def remedy(fault: str) -> str:
    lowered = fault.lower()
    return next((text for word, text in REMEDIES.items() if word in lowered), DEFAULT)
