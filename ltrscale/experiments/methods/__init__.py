"""The methods that a pipeline trains and compares; `composed` has their union."""
