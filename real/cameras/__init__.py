"""Cameras of a session, each in a process of its own: RealSense, OpenCV, lerobot's, or a class
of yours."""
