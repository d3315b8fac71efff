"""The methods that a pipeline trains and compares, a file for each kind; `choices` has their union."""
