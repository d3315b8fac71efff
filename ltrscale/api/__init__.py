"""Rankers in scikit-learn's conventions, on tables in memory."""
