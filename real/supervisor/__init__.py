"""The process that owns the arm: modes, leases, chunks, the gate, one decision per tick. It
imports no torch."""
