"""How fast and how exact: errors in ulp, the oracle, ``check``, the tables and pages that show them."""
