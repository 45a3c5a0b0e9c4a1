"""The report of a run or of a study: reading (`runs`), figures, diagnostics, charts, and the
pages."""
