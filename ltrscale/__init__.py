"""ltrscale: learning to rank under label scarcity, from raw logs to an evaluated ranker."""
