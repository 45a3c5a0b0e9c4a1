"""What a run tells while it goes: metrics and the places they go to, progress, the machine."""
