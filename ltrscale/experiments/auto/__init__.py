"""The best ranker of a log by one command."""
