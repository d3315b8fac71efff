"""Exact-match features: how often and how rarely the words of a query occur in a document."""
