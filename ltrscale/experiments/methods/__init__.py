"""The methods that a pipeline trains and compares; `choices` has their union."""
