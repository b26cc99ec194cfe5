"""A classifier as an HTTP service that learns from examples and never loses one."""
