"""Tool calls: read out of what a model writes, by the family whose form it has learnt."""
