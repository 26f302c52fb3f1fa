"""The search: tries, verifies, times and selects passes in each lane."""
