"""One thin entry point per verb: parse the config, call one function of the package."""
