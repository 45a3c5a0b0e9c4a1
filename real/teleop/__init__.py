"""Devices that an operator drives the arm with, besides the page: SpaceMouse, leader arms, a
scripted operator."""
