"""Measurements of speed and accuracy: errors in ulp, the float64 oracle, ``check``, and the reports of both."""
