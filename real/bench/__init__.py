"""What a session is measured by: processes that are killed or frozen while the arm moves, lateness, takeover, the gate."""
