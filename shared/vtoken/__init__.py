"""vToken's spec in pure Python: token table, block pool, planners, policies, protocols. Standard library only."""
