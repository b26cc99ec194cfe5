"""One readable file an experiment; each has a `run(config)`. Nothing else in mbpa imports these."""
