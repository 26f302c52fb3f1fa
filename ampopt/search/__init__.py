"""The search: every pass is tried, judged and chosen, lane by lane."""
