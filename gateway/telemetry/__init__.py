"""What the process tells: metrics, log lines, decision records, spans."""
